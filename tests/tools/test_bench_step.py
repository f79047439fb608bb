"""tools/bench_step.py on a CPU: its table, its JSON, and what cannot run here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.setenv("DMUON_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    import bench_step

    monkeypatch.setattr(bench_step, "WINDOW_S", 0.001)
    monkeypatch.setattr(bench_step, "HOST_STEPS", 1)
    monkeypatch.setattr(bench_step, "resolve", lambda device: "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield bench_step
    torch.set_num_threads(threads)


def run(tool: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench_step", *arguments])
    status: int = tool.run("bench_step", tool.main)
    return status


def test_one_table_the_phases_and_all_in_json(
    tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    arguments = ("--preset", "tiny", "--rounds", "2", "--steps", "3", "--json", str(out))
    assert run(tool, monkeypatch, *arguments) == 0
    printed = capsys.readouterr().out
    report = json.loads(out.read_text())
    rows = {row["optimizer"]: row for row in report["rows"]}
    assert "failed" in rows.pop("gram-newton-schulz")  # not installed, or no GPU
    assert rows.keys() == {"ours", "AdamW, fused", "plain NS, batched", "torch.optim.Muon"}
    for label, row in rows.items():
        assert 0 < row["p20_us"] <= row["median_us"] <= row["p80_us"] and row["host_us"] > 0, label
    for label in ("ours", "plain NS, batched"):  # bf16 weights hold the update to 2^-9
        assert 0 < rows[label]["off"] < 0.005
    assert set(report["ours"]["phases_us"]) == {"check", "group", "momentum", "chain", "update", "AdamW"}
    assert {(run[0], run[2], run[3]) for run in report["ours"]["runs"]} == {
        ("8x64x64", "library 3/3", 8), ("2x192x64", "library 3/3", 2), ("2x64x192", "library 3/3", 2)
    }
    assert report["ours"]["memory"]["steps"] == 3
    assert "fastest other Muon" in printed and "8x64x64" in printed


def test_an_entrant_that_fails_does_so_alone(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no kernels")

    real = tool.entrants()
    monkeypatch.setattr(tool, "entrants", lambda: real | {"plain": ("plain NS", broken)})
    arguments = ("--preset", "tiny", "--entrants", "plain,adamw", "--rounds", "2")
    assert run(tool, monkeypatch, *arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("plain NS" in line and "RuntimeError: no kernels" in line for line in lines)
    assert any(line.startswith("AdamW, fused") and line.split()[2] != "-" for line in lines)


@pytest.mark.parametrize("arguments", [("--preset", "gpt9"), ("--entrants", "ours,all"), ("--rounds", "0")])
def test_what_is_asked_wrongly_is_refused(
    tool: Any, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    assert run(tool, monkeypatch, *arguments) == 2
