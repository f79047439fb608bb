"""The examples run: the tiny model is the preset and learns with Muon; the comparison on bytes says what it should."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from dmuon_tune.matrices import select
from dmuon_tune.models import presets

from . import forked

ROOT = Path(__file__).resolve().parent.parent


def environ(cache_dir: Path) -> dict[str, str]:
    return {**os.environ, "DMUON_TUNE_CACHE_DIR": str(cache_dir), "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"}


def lines_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def example(*command: str, cache_dir: Path) -> list[str]:
    return lines_of(forked.run(*command, environ=environ(cache_dir), folder=cache_dir))


def test_the_model_is_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    model = importlib.import_module("tiny_model").TinyModel()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes == dict(presets.load("tiny").parameters)
    assert select(shapes.items()).counts() == {(64, 64): 8, (192, 64): 2, (64, 192): 2}


def test_the_loss_falls_with_both_optimizers(tmp_path: Path) -> None:
    lines = example(str(ROOT / "examples/train_tiny.py"), "--device", "cpu", "--steps", "41", cache_dir=tmp_path)
    assert any(line.startswith("Muon's products on") for line in lines)
    losses = {int(row[0]): row[1:] for row in map(str.split, lines) if row and row[0].isdigit()}
    for first, last in zip(losses[0], losses[40], strict=True):
        assert float(last) < 0.5 * float(first)
    assert float(losses[40][1]) < 2.1, "Muon should have learned more than the letters' frequencies"


SMALL = {"layers": 1, "width": 32, "heads": 2, "length": 32, "batch": 4, "steps": 10}


def test_the_comparison_on_bytes_sweeps_both_and_repeats(tmp_path: Path) -> None:
    sizes = [word for name, size in SMALL.items() for word in (f"--{name}", str(size))]
    out = tmp_path / "out.json"
    rates = ("--adamw-rates", "4e-3,1e-2", "--muon-rates", "0.02")
    program = str(ROOT / "examples/train_bytes.py")
    lines = example(program, "--device", "cpu", *sizes, *rates, "--json", str(out), cache_dir=tmp_path)
    assert lines[-1] == "the same run again: equal to the bit"
    result = json.loads(out.read_text())
    runs = [(run["optimizer"], run["rate"], run["steps"]) for run in result["runs"]]
    assert runs == [("AdamW", 4e-3, 10), ("AdamW", 1e-2, 10), *[("Muon", 0.02, 10)] * 2, ("Muon", 0.02, 7)]
    for run in result["runs"]:
        losses = [run["losses"][key] for key in sorted(run["losses"], key=int)]
        assert losses[-1] < losses[0] < 6 and len(losses) == run["steps"]
    assert result["adamw_loss"] == min(run["losses"]["10"] for run in result["runs"][:2])


def test_a_dedicated_run_of_two_ranks_goes_on_sharded_with_one(tmp_path: Path) -> None:
    sizes = [word for name, size in (SMALL | {"steps": 0}).items() for word in (f"--{name}", str(size))]
    program = [str(ROOT / "examples/train_fsdp2.py"), *sizes, "--checkpoints", str(tmp_path / "run"), "--steps"]
    settings = {"environ": environ(tmp_path), "folder": tmp_path}
    first, other = forked.run_ranks(2, *program, "4", "--dedicated", **settings)
    assert lines_of(other) == []
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    second = forked.run(*launcher, *program, "6", **settings)
    lines = lines_of(first) + lines_of(second)
    losses = [line.split()[1::2] for line in lines if line.startswith("step")]
    assert [int(step) for step, _ in losses] == [1, 2, 3, 4, 5, 6]
    assert float(losses[-1][1]) < float(losses[3][1]) < float(losses[0][1])
