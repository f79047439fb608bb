"""``shapes``: one table, whatever the shapes come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from dmuon_tune.models import presets

from .conftest import Run

torch = pytest.importorskip("torch")


def test_qwen_7b(run: Run) -> None:
    result = run("shapes", "--preset", "qwen2.5-7b")
    assert result.code == 0
    lines = [line.split()[:3] for line in result.out.splitlines()[:5]]
    assert lines == [
        ["rows", "cols", "count"], ["512", "3584", "56"], ["3584", "3584", "56"], ["3584", "18944", "28"],
        ["18944", "3584", "56"],
    ]
    assert "embedding" in result.out and "model.layers.*.self_attn.{k_proj,v_proj}.bias" in result.out


def test_the_same_table_from_config_and_index(run: Run, tmp_path: Path) -> None:
    expected = run("shapes", "--preset", "qwen2.5-7b").out
    (tmp_path / "config.json").write_text(json.dumps(presets.CONFIGS["qwen2.5-7b"]))
    assert run("shapes", "--model", str(tmp_path / "config.json")).out == expected


def test_the_same_table_from_a_stored_checkpoint(run: Run, tmp_path: Path) -> None:
    parameters = presets.load("tiny").parameters
    halves = {"a.safetensors": parameters[::2], "b.safetensors": parameters[1::2]}
    for shard, part in halves.items():
        save_file({name: torch.zeros(shape) for name, shape in part}, tmp_path / shard)
    weight_map = {name: shard for shard, part in halves.items() for name, _ in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    torch.save({name: torch.zeros(shape) for name, shape in parameters}, tmp_path / "model.pt")
    expected = run("shapes", "--preset", "tiny").out
    for source in ("model.safetensors.index.json", "model.pt"):
        assert run("shapes", "--model", str(tmp_path / source)).out == expected


def test_json_holds_names_groups_and_reasons(run: Run) -> None:
    found = run("shapes", "--preset", "tiny", "--format", "json").json
    assert [(row["rows"], row["cols"], row["count"]) for row in found["matrices"]] == [
        (64, 64, 8), (64, 192, 2), (192, 64, 2),
    ]
    assert len(found["matrices"][0]["names"]) == 8
    assert found["groups"][0] == {"batch": 8, "rows": 64, "cols": 64}
    assert {row["reason"] for row in found["left_out"]} == {"embedding", "head"}


def test_patterns_override_the_rule(run: Run) -> None:
    result = run(
        "shapes", "--preset", "tiny", "--include", "head.*", "--exclude", "*.up.*", "--exclude", "*.typo.*",
        "--format", "json",
    )
    assert {(row["rows"], row["cols"]) for row in result.json["matrices"]} == {(64, 64), (64, 192), (256, 64)}
    assert "dmuon-tune: warning: pattern '*.typo.*' matches no parameter of tiny" in result.err


def test_written_shapes(run: Run) -> None:
    found = run("shapes", "--shapes", "8x2048x5464,1024x1024", "--format", "json").json
    assert [(row["rows"], row["cols"], row["count"]) for row in found["matrices"]] == [
        (1024, 1024, 1), (2048, 5464, 8),
    ]
    assert {"batch": 8, "rows": 2048, "cols": 5464} in found["groups"]
