"""``cache build`` says what it leaves out or cannot build, each in a line, with the documented exit codes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dmuon_tune.backends import backends
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import Store
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernel
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.space import config_to_dict

from .conftest import Run

H200 = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 50 * 2**20, 140 * 2**30)
GRAM = Problem("gram", 2, 64, 64, 96)


def record(path: Path, name: str, problem: Problem, device: DeviceFingerprint, digest: str = "") -> None:
    spec = kernel(name)
    key = tuning_key(spec, problem, device)
    config = config_to_dict(spec.untuned(problem, device))
    with Store.open(path) as store:
        measured = Measurement.from_samples([10.0], 1e-6, {})
        store.record(replace(key, spec_digest=digest or key.spec_digest), config, measured, {"validation": "test"})


def test_what_the_cache_does_not_hold_is_a_missing_entry(run: Run, own_cache: Path) -> None:
    assert run("cache", "build").code == 4
    record(own_cache, "gram.library", replace(GRAM, dtype="float32", out_dtype="float32"), fingerprint("cpu"))
    missing = run("cache", "build", "--arch", "sm_90a", "--arch", "sm_80")
    assert missing.code == 3 and "nothing for sm_90a, sm_80; it holds cpu-" in missing.err and not missing.out


def test_the_librarys_kernels_need_no_artefact(run: Run, own_cache: Path) -> None:
    record(own_cache, "gram.library", replace(GRAM, dtype="float32", out_dtype="float32"), fingerprint("cpu"))
    nothing = run("cache", "build", "--format", "json")
    assert nothing.code == 0 and nothing.json["artefacts"] == [] and "nothing to compile" in nothing.err
    assert not (own_cache.parent / "artefacts").exists()


def test_a_winner_of_other_code_is_left_out_and_said(run: Run, own_cache: Path) -> None:
    if reason := backends()["triton"].unavailable(H200):
        pytest.skip(reason)
    record(own_cache, "gram.triton", GRAM, H200, digest="ab" * 32)
    stale = run("cache", "build", "--arch", "sm_90a")
    assert stale.code == 0 and "1 of 1 winner left out" in stale.err and "dmuon-tune show" in stale.err


def test_what_cannot_be_built_here_fails_with_its_reason(run: Run, own_cache: Path) -> None:
    """Another CPU's kernel is compiled there: this one may lack its instructions."""
    if reason := backends()["tilelang"].unavailable(fingerprint("cpu")):
        pytest.skip(reason)
    here = fingerprint("cpu")
    other = replace(here, name="Another", sm_count=here.sm_count + 1)
    record(own_cache, "gram.tilelang", replace(GRAM, dtype="float32", out_dtype="float32"), other)
    built = run("cache", "build", "--arch", "cpu", "--format", "json")
    (row,) = built.json["artefacts"]
    assert built.code == 1 and row["state"] == "failed" and "Another" in row["detail"]
    assert "error: 1 artefact not built" in built.err
