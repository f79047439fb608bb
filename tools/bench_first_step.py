"""Times the first step of a fresh process on a shipped cache: no DSL that can be imported, no compiler to be found.

    dmuon-tune tune --preset qwen2.5-1.5b --cache tuned.sqlite
    python tools/bench_first_step.py --preset qwen2.5-1.5b --cache tuned.sqlite

Builds the preset's artefacts beside a copy of the cache, exports the winners, imports them into an empty folder and
steps `Muon` on the preset's matrices in two processes after each other: the first checks against float64 what was
measured elsewhere, the second finds the record of that. Seconds, waited for on the device; ``origins``: whence the
chains' kernels are.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from _runner import Parser, note, run
from bench_plan import groups_of

import dmuon_tune
from dmuon_tune import cli
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cli.output import say, table
from dmuon_tune.errors import DmuonTuneError, UsageError
from dmuon_tune.models import presets

DSLS = ("tilelang", "tvm", "tvm_ffi", "cutlass", "triton", "quack")
COLUMNS = ("import_torch", "import_runtime", "make_muon", "first_step", "second_step")
KEPT = ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "DMUON_TUNE_STARTER")
CHILD = r"""
import collections, json, sys, time
given = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(given["blocked"]))
times, begin = {}, time.perf_counter()
def lap(name):
    global begin
    if given["device"] == "cuda":
        torch.cuda.synchronize()
    now = time.perf_counter()
    times[name], begin = now - begin, now
import torch
lap("import_torch")
from dmuon_tune.runtime import Muon
lap("import_runtime")
dtype, weights = getattr(torch, given["dtype"]), []
for count, rows, cols in given["matrices"]:
    for _ in range(count):
        weights.append(torch.nn.Parameter(torch.randn(rows, cols, device=given["device"]).to(dtype)))
        weights[-1].grad = torch.randn_like(weights[-1])
lap("weights")
optimizer = Muon(weights, lr=1e-3, verbose=False)
lap("make_muon")
for name in ("first_step", "second_step"):
    optimizer.step()
    lap(name)
origins = collections.Counter(row["origin"] for plan in optimizer.plan() for row in plan.rows())
print(json.dumps({**times, "origins": dict(origins)}))
"""


def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="bench_first_step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen2.5-1.5b", choices=presets.names())
    parser.add_argument("--cache", type=Path, required=True, help="a tuned cache file of this device")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    options = parser.parse_args(arguments)
    if not options.cache.is_file():
        raise UsageError(f"--cache {options.cache}: there is no such file; make it by 'dmuon-tune tune --cache'")
    device = fingerprint(options.device)
    matrices = [(group.batch, group.rows, group.cols) for group in groups_of(options.preset)]
    given = {"device": device.kind, "dtype": "bfloat16" if device.kind == "cuda" else "float32", "matrices": matrices}
    with tempfile.TemporaryDirectory(prefix="dmuon-tune-") as folder:
        fresh = shipped(options.cache, options.preset, Path(folder), device.arch)
        rows = [stepped({**given, "blocked": DSLS}, fresh) for _ in range(2)]
    if options.format == "json":
        say(json.dumps({"device": device.name, "preset": options.preset, "processes": rows}))
        return 0
    shown = [[f"{row[name]:.3f}" for name in COLUMNS] + [counts(row["origins"])] for row in rows]
    say(table(["process", *COLUMNS, "origins"], [["first", *shown[0]], ["second", *shown[1]]]))
    return 0


def counts(origins: dict[str, int]) -> str:
    return " ".join(f"{origin}:{count}" for origin, count in origins.items())


def shipped(cache: Path, preset: str, folder: Path, arch: str) -> Path:
    """A cache folder into which the winners of ``cache`` and the preset's compiled kernels have been imported."""
    copy, bundle, fresh = folder / "built" / "cache.sqlite", folder / "shipped.bundle", folder / "fresh"
    copy.parent.mkdir()
    shutil.copyfile(cache, copy)
    for command in (
        ["build", "--cache", str(copy), "--arch", arch, "--preset", preset],
        ["export", str(bundle), "--only", "winners", "--cache", str(copy)],
        ["import", str(bundle), "--cache", str(fresh / "cache.sqlite")],
    ):
        note(f"cache {command[0]}", "bench_first_step")
        with redirect_stdout(sys.stderr):
            code = cli.main(["cache", *command])
        if code:
            raise DmuonTuneError(f"'dmuon-tune cache {command[0]}' ended with exit code {code}")
    return fresh


def stepped(given: dict[str, Any], fresh: Path) -> dict[str, Any]:
    """What a process with nothing but the runtime and that cache folder says."""
    paths = [str(Path(path).resolve().parent) for path in dmuon_tune.__path__[:1]]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    environ = {name: os.environ[name] for name in KEPT if name in os.environ}
    environ |= {"PATH": "/nonexistent", "HOME": "/nonexistent", "PYTHONPATH": os.pathsep.join(paths)}
    environ |= {"DMUON_TUNE_CACHE_DIR": str(fresh)}
    command = [sys.executable, "-c", CHILD, json.dumps(given)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise DmuonTuneError(f"the process without DSLs ended with exit code {done.returncode}: {last}")
    sys.stderr.write(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(run("bench_first_step", main))
