"""Two caches compared: the same winners, close ones and others."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dmuon_tune.backends import backends
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import Store
from dmuon_tune.kernel_specs import kernel
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, Recipe

from .. import forked

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"
SPEC, DEVICE = kernel("gram.tilelang"), fingerprint("cpu")


def cache(path: Path, times_us: dict[int, dict[int, float]]) -> str:
    """A cache of made-up times: order m → configuration's place → microseconds."""
    with Store.open(path) as store:
        for m, of_place in times_us.items():
            problem = Problem("gram", 1, m, m, 64, "float32", "float32")
            legal = SPEC.legal_space(problem, DEVICE)
            for place, median_us in of_place.items():
                found = Measurement.from_samples([median_us], 0.0, {})
                store.record(tuning_key(SPEC, problem, DEVICE), dict(vars(legal[place])), found, {})
    return str(path)


Compare = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Compare:
    """The program in this process."""
    monkeypatch.syspath_prepend(str(TOOLS))
    runner, tool = map(importlib.import_module, ("_runner", "compare_caches"))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["compare_caches", *arguments])
        code = runner.run("compare_caches", tool.main)
        return subprocess.CompletedProcess(sys.argv, code, *capsys.readouterr())

    return run


def test_as_a_program_its_error_is_one_line(tmp_path: Path) -> None:
    program = (str(TOOLS / "compare_caches.py"), "nowhere.sqlite", "x")
    done = forked.run(*program, environ={**os.environ, "PYTHONPATH": str(ROOT)}, folder=tmp_path)
    assert done.returncode == 4 and done.stderr.startswith("compare_caches: error: no cache at")
    assert done.stdout == "" and done.stderr.count("\n") == 1


def test_winners_are_the_same_or_so_far_apart(compare: Compare, tmp_path: Path) -> None:
    first = cache(tmp_path / "a.sqlite", {64: {0: 10.0, 1: 30.0}, 96: {0: 10.0, 1: 10.3}, 128: {0: 9.0}, 160: {0: 1.0}})
    second = cache(tmp_path / "b.sqlite", {64: {0: 12.0, 1: 30.0}, 96: {0: 10.3, 1: 10.0}, 128: {1: 9.9}})
    done = compare(first, second)
    apart = {line.split()[1]: line.split()[-1] for line in done.stdout.splitlines()[1:]}
    assert apart == {"1x64x64x64": "same", "1x96x96x64": "3.00%", "1x128x128x64": "10.00%"}
    assert done.returncode == 1 and "3 problems in both caches, 1 in one alone: 1 with the same winner" in done.stderr
    assert "2 with winners more than 1% apart" in done.stderr
    assert compare(first, second, "--within", "0.11").returncode == 0
    assert "chain" not in done.stdout + done.stderr
    backwards = compare(first, second, "--within", "-1")
    assert backwards.returncode == 2 and "--within: -1 is not more than 0" in backwards.stderr
    missing = compare(first, "nowhere.sqlite")
    assert missing.returncode == 4 and missing.stderr.startswith("compare_caches: error: no cache at")


def test_chains_that_both_have_timed_are_set_in_relation(compare: Compare, tmp_path: Path) -> None:
    paths = [cache(tmp_path / name, {64: {0: 10.0}}) for name in ("a.sqlite", "b.sqlite")]
    costs_us = {Group(2, 64, 64): (100.0, 104.0), Group(1, 96, 64): (50.0, 41.0), Group(1, 160, 64): (7.0, None)}
    for place, path in enumerate(paths):
        with Store.open(Path(path)) as store:
            for group, costs in costs_us.items():
                spread = 1.0 if costs[place] is not None else None
                store.put_recipe(DEVICE, Recipe(group, "plain", "float32", cost_us=costs[place], p20_us=spread))
    done = compare(*paths)
    assert done.returncode == 0, done.stderr
    ratios = {line.split()[0]: line.split()[-1] for line in done.stdout.splitlines()[-2:]}
    assert ratios == {"2x64x64": "1.040", "1x96x64": "0.820"}
    assert "2 chains timed in both: 145 us in all against 150, 0.967 times as long" in done.stderr


@pytest.mark.skipif(
    backends()["tilelang"].unavailable(DEVICE) is not None, reason="TileLang's CPU target cannot run here"
)
def test_winners_that_differ_may_be_timed_against_each_other(compare: Compare, tmp_path: Path) -> None:
    """What the caches say of them, a hundredfold here, is not asked then; the same winners are not timed."""
    first = cache(tmp_path / "a.sqlite", {64: {0: 1.0}, 96: {0: 1.0}})
    second = cache(tmp_path / "b.sqlite", {64: {1: 100.0}, 96: {0: 5.0}})
    assert compare(first, second, "--within", "50").returncode == 1
    done = compare(first, second, "--within", "50", "--race", "cpu")
    assert done.returncode == 0, done.stderr
    apart = {line.split()[1]: line.split()[-1] for line in done.stdout.splitlines()[1:]}
    assert apart["1x96x96x64"] == "same" and float(apart["1x64x64x64"].removesuffix("%")) < 5000
    with Store.open(Path(second)) as store:
        key = tuning_key(SPEC, Problem("gram", 1, 64, 64, 64, "float32", "float32"), DEVICE)
        illegal = {**dict(vars(SPEC.legal_space(key.problem, DEVICE)[1])), "threads": 7}
        store.record(key, illegal, Measurement.from_samples([0.5], 0.0, {}), {})
    failed = compare(first, second, "--within", "50", "--race", "cpu")
    assert failed.returncode == 1 and "inf%" in failed.stdout
