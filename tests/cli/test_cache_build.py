"""``cache build`` says what it leaves out or cannot build, each in a line, with the documented exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dmuon_tune import kernel_specs
from dmuon_tune.backends import backends
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import ArtefactStore, Store
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernel
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, Recipe
from dmuon_tune.space import config_to_dict

from .conftest import Run

H200 = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 50 * 2**20, 140 * 2**30)
GRAM = Problem("gram", 2, 64, 64, 96)
MOMENTUM = Problem("momentum", 2, 64, 96, 1, "bfloat16", "float16", epilogue="none")
# Kernels of Triton whose build does something else before, each for problems of its own.
PLANTED = {"dies": "os._exit(7)", "hangs": "time.sleep(600)", "works": "open(__file__ + '.log', 'a').write('built ')"}
PLANTED_KERNEL = """
import os, time
from dataclasses import replace
from dmuon_tune.kernel_specs.momentum_triton import KERNEL as momentum

def build(problem, config, device):
    {first}
    return momentum.build(problem, config, device)

KERNEL = replace(momentum, variant="{name}", build=build, sources=(__name__,))
"""


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


def test_of_one_model_its_recipes_and_what_has_none_are_built(run: Run, own_cache: Path) -> None:
    """In batches of any size; no other model's."""
    if reason := backends()["tilelang"].unavailable(fingerprint("cpu")):
        pytest.skip(reason)
    other = replace(fingerprint("cpu"), name="Another")
    two, seven, square = (
        replace(GRAM, batch=batch, m=m, n=m, dtype="float32", out_dtype="float32")
        for batch, m in ((2, 64), (7, 64), (2, 96))
    )
    for problem in (two, seven, square):
        record(own_cache, "gram.tilelang", problem, other)
    with Store.open(own_cache) as store:
        store.put_recipe(other, Recipe(Group(7, 64, 96), "gram", "float32"))

    def built(*arguments: str) -> set[str]:
        rows = run("cache", "build", *arguments, "--format", "json").json["artefacts"]
        return {row["problem"] for row in rows if row["kernel"] == "gram.tilelang"}

    assert built() == {each.label() for each in (two, seven, square)}
    assert built("--shapes", "2x64x96") == {two.label(), seven.label()}
    assert built("--shapes", "7x64x96") == {seven.label()}
    assert built("--shapes", "2x96x96,7x64x96") == {square.label(), seven.label()}
    missing = run("cache", "build", "--shapes", "2x64x97")
    assert missing.code == 3 and "has nothing for 2x64x97; tune it there first" in missing.err and not missing.out
    assert run("cache", "build", "--shapes", "2x64x96", "--preset", "tiny").code == 2
    assert run("cache", "build", "--include", "head*").code == 2


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> Path:
    """A cache whose winners are the planted kernels, that which works on two devices that differ in their memory
    alone; the folder of their modules."""
    if reason := backends()["triton"].unavailable(H200):
        pytest.skip(reason)
    for name, first in PLANTED.items():
        (tmp_path / f"planted_{name}.py").write_text(PLANTED_KERNEL.format(name=name, first=first))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(kernel_specs.EXTRA_MODULES_VARIABLE, ",".join(f"planted_{name}" for name in PLANTED))
    kernel_specs._modules.cache_clear()
    for batch, name in enumerate(PLANTED, start=1):
        record(own_cache, f"momentum.triton.{name}", replace(MOMENTUM, batch=batch), H200)
    smaller = replace(H200, name="another", memory_bytes=80 * 2**30)
    record(own_cache, "momentum.triton.works", replace(MOMENTUM, batch=3), smaller)
    yield tmp_path
    kernel_specs._modules.cache_clear()


def test_builds_that_die_or_hang_fail_alone_and_an_interrupt_keeps_what_is_built(
    run: Run, own_cache: Path, planted: Path
) -> None:
    building = subprocess.Popen(
        [sys.executable, "-m", "dmuon_tune", "cache", "build", "--jobs", "3"],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(planted / "triton")},
    )
    assert building.stderr is not None
    lines = [building.stderr.readline() for _ in range(2)]
    building.send_signal(signal.SIGINT)
    assert building.wait(30) == 130
    assert "interrupted; what was built is kept" in building.stderr.read()
    assert {line.split(":")[1].split()[-1] for line in lines} == {"built", "failed"}, lines
    store = ArtefactStore.beside(own_cache)
    (first,) = store.all()
    assert first.key.kernel == "momentum.triton.works" and not store.verify()

    again = run("cache", "build", "--compile-timeout", "1s", "--format", "json")
    rows = [(row["kernel"].rpartition(".")[2], row["state"], row["detail"]) for row in again.json["artefacts"]]
    details = {name: detail for name, state, detail in rows if state == "failed"}
    assert again.code == 1 and set(details) == {"dies", "hangs"} and "2 artefacts not built" in again.err
    assert details["hangs"].startswith("timeout: still compiling after 1 s")
    assert [state for name, state, _ in rows if name == "works"] == ["kept", "built"]
    assert len({artefact.sha256 for artefact in store.all()}) == 1 and len(store.all()) == 2
    assert (planted / "planted_works.py.log").read_text() == "built "
