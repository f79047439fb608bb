"""The Triton kernels: results in Triton's interpreter, generated code on any machine, results on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dmuon_tune.backends import backends
from dmuon_tune.backends.cubin import cubin_resources
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import _triton_polar_space, _triton_tiles, kernel, ops
from dmuon_tune.kernel_specs._triton_polar_space import PolarConfig
from dmuon_tune.kernel_specs._triton_tiles import TileConfig, lower_tiles
from dmuon_tune.measure.verify import verify
from dmuon_tune.problem import Problem

pytest.importorskip("triton")

H200 = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 50 * 2**20, 140 * 2**30)
A100 = DeviceFingerprint("NVIDIA A100", "sm_80", 108, 166912, 40 * 2**20, 80 * 2**30)
B200 = DeviceFingerprint("NVIDIA B200", "sm_100", 148, 232448, 126 * 2**20, 180 * 2**30)
KERNELS = {op: kernel(f"{op}.triton") for op in ("gram", "gemm_symmetric", "apply", "polar_small")}
INTERPRETED = "DMUON_TUNE_TEST_INTERPRETED"  # set in the process that interprets: test_interpreter.py


def problem(
    op: str, batch: int, m: int, other: int, dtype: str = "float16", layout: str = "row", epilogue: str = "none",
    out_dtype: str = "",
) -> Problem:
    """``other`` is k of the symmetric products and n elsewhere."""
    n, k = (m, other) if op in ("gram", "gemm_symmetric") else (other, m)
    return Problem(op, batch, m, n, k, dtype, out_dtype or dtype, layout, epilogue)


def polar(
    batch: int, m: int, n: int, dtype: str, layout: str = "row", epilogue: str = "s5r2", out_dtype: str = ""
) -> Problem:
    return problem("polar_small", batch, m, n, dtype, layout, epilogue, out_dtype)


PRODUCT_CASES = [
    (problem("gram", 2, 300, 70), TileConfig(64, 128, 64, 2, 4, 2)),
    (problem("gram", 1, 330, 33, layout="col"), TileConfig(64, 64, 32, 2, 4, 4)),
    (problem("gram", 1, 530, 16), TileConfig(256, 64, 32, 2, 8, 1)),
    (problem("gram", 2, 1, 1), TileConfig(64, 64, 32, 2, 4, 1)),
    (problem("gemm_symmetric", 2, 130, 130, epilogue="ci"), TileConfig(64, 64, 64, 2, 4, 1)),
    (problem("gemm_symmetric", 1, 130, 130, layout="col", epilogue="i"), TileConfig(64, 256, 64, 2, 8, 1)),
    (problem("gemm_symmetric", 2, 65, 65, layout="col", epilogue="c", out_dtype="float32"), TileConfig(64, 64, 64)),
    (problem("apply", 2, 65, 200, epilogue="c"), TileConfig(64, 64, 64, 2, 4, 4)),
    (problem("apply", 2, 65, 200, layout="col", out_dtype="float32"), TileConfig(64, 64, 32, 2, 4, 4)),
]
POLAR_CASES = [
    (polar(2, 1, 1, "float32"), PolarConfig("plain", 16, 1, 1)),
    (polar(2, 3, 5, "float16", "col"), PolarConfig("gram", 16, 1, 1)),
    (polar(5, 33, 70, "float16", "row", "s5", "float32"), PolarConfig("gram", 64, 4, 2)),
    (polar(2, 64, 200, "float32", "col", "s4r1", "float16"), PolarConfig("gram", 64, 4, 2)),
    (polar(2, 100, 128, "float16", "col", "s3"), PolarConfig("plain", 128, 8, 1)),
]
ALL_CASES = PRODUCT_CASES + POLAR_CASES


def case_id(value: Any) -> str:
    return value.label() if isinstance(value, Problem) else "-".join(str(v) for v in vars(value).values())


def interpreted(spec_problem: Problem, config: Any) -> str:
    """Why the check fails on this kernel run by Triton's interpreter, on the CPU, or nothing."""
    program = KERNELS[spec_problem.op].build(spec_problem, config, A100)  # no overlap of launches
    (one,) = program.kernels

    def run(grid: tuple[int, int, int], *arguments: Any) -> None:
        one.function[grid](*arguments, **one.constants)

    return verify(program.host(run), ops()[spec_problem.op], spec_problem, "cpu", seed=1).failure


@pytest.mark.parametrize(("asked", "config"), ALL_CASES if INTERPRETED in os.environ else [], ids=case_id)
def test_in_the_interpreter(asked: Problem, config: Any) -> None:
    assert interpreted(asked, config) == ""


def compile_cases() -> Iterator[tuple[Problem, Any, DeviceFingerprint]]:
    yield polar(64, 128, 128, "bfloat16"), PolarConfig("plain", 128, 8, 1), H200
    yield polar(64, 64, 512, "bfloat16", "col"), PolarConfig("gram", 64, 4, 2), H200
    yield polar(12, 64, 4096, "bfloat16"), PolarConfig("gram", 64, 4, 2, 8), H200
    yield polar(64, 32, 32, "bfloat16"), PolarConfig("plain", 32, 2, 1), A100
    yield polar(64, 64, 64, "bfloat16"), PolarConfig("plain", 64, 4, 1), B200
    for device in (H200, A100, B200):
        yield problem("gemm_symmetric", 1, 1024, 1024, epilogue="ci"), TileConfig(), device
    yield problem("gram", 1, 1024, 4096, "bfloat16", "col"), TileConfig(64, 128, 64, 4, 4, 8), H200
    yield problem("apply", 1, 1024, 4096), TileConfig(128, 256, 64, 3, 8), H200


@pytest.mark.parametrize(
    ("asked", "config", "device"), list(compile_cases()), ids=lambda v: v.arch if hasattr(v, "arch") else case_id(v)
)
def test_generated_code_fits(asked: Problem, config: Any, device: DeviceFingerprint) -> None:
    """Tensor cores, no spills, and no more shared memory than legality counted."""
    from dmuon_tune.backends.triton import _compile

    spec = KERNELS[asked.op]
    assert spec.is_legal(asked, config, device)
    (one,) = spec.build(asked, config, device).kernels
    binary = _compile(one, device, one.aligned)
    found = cubin_resources(binary.asm["cubin"])
    assert 0 < found["registers"] <= 255 and found["spill_bytes"] == 0
    module = _triton_polar_space if asked.op == "polar_small" else _triton_tiles
    assert binary.metadata.shared <= module.smem_bytes(asked, config) <= device.smem_per_block_bytes
    assert {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}[device.arch] in binary.asm["ptx"]


@pytest.mark.parametrize("sides", [(64, 64), (64, 256), (256, 64), (128, 64)], ids=str)
@pytest.mark.parametrize("extent", [1, 64, 65, 300, 1024, 1337])
def test_lower_tiles_counts_steps_of_the_longer_side(extent: int, sides: tuple[int, int]) -> None:
    config = TileConfig(*sides, 64)
    step = max(sides)
    counted = sum(
        1
        for row in range(0, -(-extent // step) * step, sides[0])
        for col in range(0, row // step * step + step, sides[1])
    )
    assert lower_tiles(extent, config) == counted


@pytest.mark.parametrize("device", [H200, A100, B200], ids=lambda device: device.arch)
@pytest.mark.parametrize("op", sorted(KERNELS))
def test_untuned_configurations_are_legal(op: str, device: DeviceFingerprint) -> None:
    spec = KERNELS[op]
    epilogue = "s5r2" if op == "polar_small" else "none"
    for m, other in ((1, 1), (16, 40), (64, 64), (100, 3000), (128, 128)):
        for layout in ("row", "col"):
            asked = problem(op, 3, m, other, "bfloat16", layout, epilogue)
            config = spec.untuned(asked, device)
            assert config is not None and spec.is_legal(asked, config, device)
            assert config == spec.heuristic(asked, device), "the heuristic's own choice is legal"


def test_the_space_is_wide_and_illegal_configurations_say_why() -> None:
    big = problem("gemm_symmetric", 1, 4096, 4096, epilogue="c")
    assert len(KERNELS["gemm_symmetric"].legal_space(big, H200)) > 200
    assert len(KERNELS["polar_small"].legal_space(polar(12, 64, 1024, "bfloat16"), H200)) > 15
    illegality = KERNELS["gemm_symmetric"].illegality
    assert "shared memory" in (illegality(big, TileConfig(256, 128, 128, 5, 8), H200) or "")
    assert "accumulators" in (illegality(big, TileConfig(256, 256, 32, 2, 8), H200) or "")
    assert "smaller tile" in (illegality(problem("gram", 1, 64, 512), TileConfig(128, 64, 64), H200) or "")
    assert "stages" in (illegality(problem("gram", 1, 512, 64), TileConfig(64, 64, 64, 5), H200) or "")
    small = polar(1, 128, 128, "bfloat16")
    for config, reason in (
        (PolarConfig("plain", 128, 4, 1), "registers"), (PolarConfig("plain", 64, 8, 1), "all columns"),
        (PolarConfig("plain", 128, 8, 2), "one stage"), (PolarConfig("gram", 256, 8, 1), "smaller block"),
        (PolarConfig("plain", 128, 8, 1, 2), "one block"), (PolarConfig("gram", 64, 8, 1, 4), "can share"),
    ):
        assert reason in (KERNELS["polar_small"].illegality(small, config, H200) or "")
    many = polar(67, 128, 512, "bfloat16")
    assert "at once" in (KERNELS["polar_small"].illegality(many, PolarConfig("gram", 64, 8, 1, 2), H200) or "")
    twice = polar(1, 128, 128, "bfloat16", "row", "s7r2r4")
    assert "once" in (KERNELS["polar_small"].illegality(twice, PolarConfig("gram", 64, 8, 1), H200) or "")
    assert KERNELS["polar_small"].untuned(twice, H200) == PolarConfig("plain", 128, 8, 1)


def test_refusals_say_why() -> None:
    assert "tf32" in (KERNELS["gram"].refusal(problem("gram", 1, 64, 64, "float32"), H200) or "")
    assert "GPU" in (KERNELS["gram"].refusal(problem("gram", 1, 64, 64), fingerprint("cpu")) or "")
    assert "epilogue" in (KERNELS["apply"].refusal(problem("apply", 1, 64, 64, epilogue="i"), H200) or "")
    assert "128 rows" in (KERNELS["polar_small"].refusal(polar(1, 129, 200, "bfloat16"), H200) or "")
    assert "2^31" in (KERNELS["polar_small"].refusal(polar(1, 128, 2**24, "bfloat16"), H200) or "")
    assert "short side" in (KERNELS["polar_small"].refusal(polar(1, 64, 32, "bfloat16"), H200) or "")
    assert "restarts" in (KERNELS["polar_small"].refusal(polar(1, 64, 64, "bfloat16", epilogue="c"), H200) or "")


GPU_CASES = [
    *PRODUCT_CASES[:3], PRODUCT_CASES[4], PRODUCT_CASES[7], PRODUCT_CASES[8], *POLAR_CASES[1:],
    (polar(64, 128, 128, "bfloat16"), PolarConfig("plain", 128, 8, 1)),
    (polar(3, 127, 600, "bfloat16", "col"), PolarConfig("gram", 64, 8, 2)),
    (polar(5, 64, 1000, "bfloat16"), PolarConfig("gram", 64, 4, 2, 8)),
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("asked", "config"), GPU_CASES, ids=case_id)
def test_results_match_float64(asked: Problem, config: Any) -> None:
    device = fingerprint("cuda")
    if KERNELS[asked.op].illegality(asked, config, device):
        pytest.skip("not legal on this GPU")
    compiled = backends()["triton"].compile(KERNELS[asked.op].build(asked, config, device), asked, device)
    op = ops()[asked.op]
    assert verify(compiled.launch, op, asked, "cuda", seed=1).failure == ""
    arguments = op.arguments(asked)
    inputs = op.make_inputs(asked, "cuda", 2)
    scalars = (0.75, -1.25, 0.5)[: sum(argument.role == "scalar" for argument in arguments)]
    (output,) = [argument for argument in arguments if argument.role == "output"]
    first = None
    for _ in range(100):
        out = torch.full(output.shape, float("nan"), dtype=getattr(torch, output.dtype), device="cuda")
        compiled.launch(*inputs, out, *scalars)
        first = out if first is None else first
        assert torch.equal(first, out)
    if op.symmetric_output:
        assert first is not None and torch.equal(first, first.mT)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_polar_small_on_zero_nan_inf_and_any_scale() -> None:
    """Zero gives zero, NaN and inf give NaN in their matrix alone, and a power of two in the scale changes no bit."""
    device, op = fingerprint("cuda"), ops()["polar_small"]
    for config in (PolarConfig("plain", 128, 4, 1), PolarConfig("gram", 64, 4, 2), PolarConfig("gram", 64, 4, 2, 2)):
        asked = polar(4, 64, 128, "float32")
        launch = backends()["triton"].compile(KERNELS["polar_small"].build(asked, config, device), asked, device).launch
        u, coefficients = op.make_inputs(asked, "cuda", 0)
        y, scaled = torch.empty_like(u), torch.empty_like(u)
        launch(u, coefficients, y, 1.0)
        for exponent in (-100, -30, 17, 120):
            launch(u * 2.0**exponent, coefficients, scaled, 1.0)
            assert torch.equal(y, scaled)
        u[0], u[1, 2, 3], u[2, 4, 5] = 0, float("nan"), float("inf")
        launch(u, coefficients, scaled, 1.0)
        assert bool((scaled[0] == 0).all() and scaled[1:3].isnan().all()) and torch.equal(scaled[3], y[3])
