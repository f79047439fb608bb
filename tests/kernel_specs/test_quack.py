"""QuACK's symmetric product: what it serves and what its absence changes on any machine; results on a Hopper GPU."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dmuon_tune.backends import backends
from dmuon_tune.cache import CacheEntry, TuningKey
from dmuon_tune.cli.tune import _gaps
from dmuon_tune.device import DeviceFingerprint, Toolchain
from dmuon_tune.kernel_specs import kernel, ops
from dmuon_tune.kernel_specs._quack import QuackConfig
from dmuon_tune.measure.winners import Contender, winner
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.search.kernel_search import usable_kernels

H200 = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 50 * 2**20, 140 * 2**30)
BACKEND = backends()["quack"]
KERNELS = {op: kernel(f"{op}.quack") for op in ("gram", "gemm_symmetric")}
TOO_OLD, NONE = "0.4.9", ""


def problem(op: str = "gram", batch: int = 1, m: int = 1024, k: int | None = None, **fields: str) -> Problem:
    dtype = fields.pop("dtype", "float16")
    return Problem(op, batch, m, m, k or m, dtype=dtype, out_dtype=fields.pop("out_dtype", dtype), **fields)


@pytest.mark.parametrize(
    ("refused", "word"),
    [
        (problem(m=1024, k=1020), "k must be a multiple of 8, not 1020"),
        (problem(m=1020, k=2048), "m must be a multiple of 8, not 1020"),
        (problem(m=1020, k=2048, layout="col"), "m must be a multiple of 8, not 1020"),
        (problem(dtype="float32"), "float32"),
        (problem(out_dtype="float32"), "float32"),
        (problem("gram", epilogue="c"), "epilogue"),
        (problem("gemm_symmetric", epilogue="ci"), "'ci'"),
        (Problem("gram", 1, 64, 128, 64), "n = m"),
    ],
)
def test_a_refusal_says_why(refused: Problem, word: str) -> None:
    assert word in (KERNELS[refused.op].refusal(refused, H200) or "")


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "cpu-x86_64-avx2"])
def test_other_devices_are_refused_by_name(arch: str) -> None:
    device = dataclasses.replace(H200, arch=arch)
    assert all(arch in (spec.refusal(problem(spec.op), device) or "") for spec in KERNELS.values())


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (QuackConfig(128, 128, 2, 1), "square"),
        (QuackConfig(64, 128, 4, 2), "8 blocks"),
        (QuackConfig(128, 256, 2, 1, pingpong=True), "ping-pong"),
        (QuackConfig(256, 256, 1, 1), "registers"),
        (QuackConfig(320, 160, 1, 2, pingpong=True), "ping-pong"),
    ],
)
def test_an_illegal_configuration_says_why(config: QuackConfig, word: str) -> None:
    assert word in (KERNELS["gram"].illegality(problem(m=8192), config, H200) or "")


@pytest.mark.parametrize(
    "config", [QuackConfig(192, 192, 1, 1), QuackConfig(192, 192, 2, 2), QuackConfig(320, 160, 1, 2)]
)
@pytest.mark.parametrize(
    ("op_name", "epilogue", "aborts"),
    [("gram", "none", "col"), ("gemm_symmetric", "none", "row"), ("gemm_symmetric", "c", "row")],
)
def test_tiles_that_its_compiler_aborts_on_are_illegal(
    config: QuackConfig, op_name: str, epilogue: str, aborts: str
) -> None:
    for layout in ("row", "col"):
        reason = KERNELS[op_name].illegality(problem(op_name, m=8192, layout=layout, epilogue=epilogue), config, H200)
        assert ("aborts" in (reason or "")) == (layout == aborts) and (layout == aborts or reason is None)


def test_the_space_holds_its_own_fixed_choice_and_the_measured_tiles() -> None:
    for m in (8, 256, 1000, 8192):
        space = KERNELS["gram"].legal_space(problem(m=m), H200)
        tiles = {(config.tile_m, config.tile_n, config.cluster_m, config.pingpong) for config in space}
        assert {(128, 256, 2, False), (128, 128, 1, True), (64, 64, 1, False), (192, 192, 1, False)} <= tiles
        assert len({dataclasses.astuple(config)[:-1] for config in space}) == 19
    assert KERNELS["gram"].untuned(problem(m=8192), H200) == QuackConfig()


@pytest.mark.parametrize("found", [NONE, TOO_OLD])
def test_without_the_package_it_says_what_to_install(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if not found:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    reason = BACKEND.unavailable(H200) or ""
    assert "dmuon-tune[quack]" in reason and found in reason
    usable, unavailable = usable_kernels(H200, ("quack",))
    assert unavailable == {"quack": reason} and {spec.backend for spec in usable} == {"library"}


@pytest.mark.skipif(BACKEND.unavailable(H200) is not None, reason="quack-kernels is not installed")
def test_it_compiles_for_hopper_without_a_gpu() -> None:
    """In a process of its own: CuTe DSL keeps the architecture that it is first imported for."""
    code = (
        "from tests.kernel_specs.test_quack import *\n"
        "asked, spec = problem('gemm_symmetric', m=200, epilogue='c', layout='col'), KERNELS['gemm_symmetric']\n"
        "BACKEND.load()\n"
        "done = BACKEND.compile(spec.build(asked, QuackConfig(64, 64, 1, 1, True, 4), H200), asked, H200)\n"
        "assert done.resources['compile_s'] > 0 and callable(done.launch)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200, cwd=Path(__file__).parents[2])


def test_tuning_warns_of_its_absence_only_where_it_was_asked_for() -> None:
    report: Any = SimpleNamespace(unavailable={"cutedsl": "why", "quack": "why too"})
    assert _gaps(report, None) == [("cutedsl", "why")]
    assert _gaps(report, ("library", "quack")) == [("cutedsl", "why"), ("quack", "why too")]


def test_a_tie_goes_to_this_projects_kernel() -> None:
    def contender(backend: str, median_us: float, untuned: bool) -> Contender:
        key = TuningKey(problem(), f"gram.{backend}", "digest", H200, Toolchain(backend, ()))
        return Contender(CacheEntry(key, {}, Measurement.from_samples([median_us], 0.0, {}), "", {}), untuned)

    ours, theirs = contender("tilelang", 10.1, False), contender("quack", 10.0, True)
    assert theirs.is_peer and not ours.is_peer
    assert winner([theirs, ours]) == ours.entry
    assert winner([contender("quack", 9.0, False), ours]) != ours.entry


@pytest.fixture(scope="module")
def hopper() -> DeviceFingerprint:
    from dmuon_tune.backends.probe import fingerprint

    found = fingerprint("cuda")
    reason = BACKEND.unavailable(found)
    if reason:
        pytest.skip(reason)
    BACKEND.load()  # type: ignore[attr-defined]
    return found


SMALL = {"swizzle": 4}
TURNS = (  # op, epilogue, layout, configuration
    ("gram", "none", "row", QuackConfig(**SMALL)),
    ("gram", "none", "row", QuackConfig(192, 192, 1, 1, **SMALL)),
    ("gram", "none", "col", QuackConfig(64, 64, 1, 1, **SMALL)),
    ("gemm_symmetric", "c", "col", QuackConfig(320, 160, 1, 2, **SMALL)),
    ("gemm_symmetric", "c", "row", QuackConfig(128, 128, 1, 1, True, 4)),
    ("gemm_symmetric", "c", "col", QuackConfig(64, 128, 2, 1, **SMALL)),
)


@pytest.mark.parametrize(("op_name", "epilogue", "layout", "config"), TURNS)
def test_what_is_run_on_a_gpu_is_legal(op_name: str, epilogue: str, layout: str, config: QuackConfig) -> None:
    asked = problem(op_name, m=200, layout=layout, epilogue=epilogue)
    assert KERNELS[op_name].illegality(asked, config, H200) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("op_name", "epilogue", "layout", "config"), TURNS)
def test_results_match_float64(
    op_name: str, epilogue: str, layout: str, config: QuackConfig, dtype: str, hopper: DeviceFingerprint
) -> None:
    op, spec = ops()[op_name], KERNELS[op_name]
    for launch_turn, (batch, m, k) in enumerate(((3, 200, 520), (2, 1000, 1384), (1, 8, 64))):
        asked = problem(
            op_name, batch, m, k if op_name == "gram" else m, layout=layout, dtype=dtype, epilogue=epilogue
        )
        if launch_turn == 0:
            assert spec.illegality(asked, config, hopper) is None
            launch = BACKEND.compile(spec.build(asked, config, hopper), asked, hopper).launch  # extents stay dynamic
        inputs, scalars = op.make_inputs(asked, "cuda", 1), (0.75, -1.25)[: 1 + asked.has_c]
        out = torch.full((batch, m, m), float("nan"), dtype=getattr(torch, dtype), device="cuda")
        launch(*inputs, out, *scalars)
        expected = op.reference(asked, *inputs, *scalars)
        error = (out.double() - expected).abs() / (expected.abs() + expected.square().mean().sqrt())
        assert error.max().item() < 4 * torch.finfo(out.dtype).eps, (m, k)
        first = out.clone()
        for _ in range(10):
            out.fill_(float("nan"))
            launch(*inputs, out, *scalars)
            assert torch.equal(out, first)
