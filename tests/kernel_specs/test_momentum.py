"""``momentum``: its definition by loops, PyTorch's kernel, Triton's in the interpreter, its code, and on a GPU."""

from __future__ import annotations

import math
import os
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernel, ops
from dmuon_tune.kernel_specs._triton_momentum_space import MomentumConfig
from dmuon_tune.kernel_specs.momentum_triton import programs
from dmuon_tune.measure.verify import addresses, verify
from dmuon_tune.problem import Problem

OP, TRITON, LIBRARY = ops()["momentum"], kernel("momentum.triton"), kernel("momentum.library")
H200 = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 50 * 2**20, 140 * 2**30)
A100 = DeviceFingerprint("NVIDIA A100", "sm_80", 108, 166912, 40 * 2**20, 80 * 2**30)
B200 = DeviceFingerprint("NVIDIA B200", "sm_100", 148, 232448, 126 * 2**20, 180 * 2**30)
FOUR_SM = DeviceFingerprint("", "sm_80", 4, 166912, 40 * 2**20, 80 * 2**30)  # two or three programs a matrix
INTERPRETED = "DMUON_TUNE_TEST_INTERPRETED"  # set in the process that interprets: test_interpreter.py
SMALL = MomentumConfig(1024, 4, 2)


def problem(batch: int, m: int, n: int, dtype: str, mode: str, out_dtype: str = "float16") -> Problem:
    return Problem("momentum", batch, m, n, 1, dtype, out_dtype, "row", mode)


def loops(mode: str, g: list[float], momentum: list[float], mu: float, scale: float, eps: float) -> list[float]:
    """X of one matrix as the definition says."""
    moved = [mu * m + x for m, x in zip(momentum, g, strict=True)]
    u = {"none": g, "m": moved, "n": [x + mu * m for x, m in zip(g, moved, strict=True)]}[mode]
    norm = math.sqrt(math.fsum(x * x for x in u))
    return [scale * x / (norm + eps) for x in u]


@pytest.mark.parametrize("mode", ["none", "m", "n"])
def test_reference_equals_loops(mode: str) -> None:
    asked = problem(2, 3, 5, "float32", mode, "float32")
    inputs = OP.make_inputs(asked, "cpu", 1)
    scalars = (0.9, 4.0, 0.25)[0 if mode != "none" else 1 :]
    result = OP.reference(asked, *inputs, *scalars)
    x = result if mode == "none" else result[1]
    for index in range(2):
        g, *momentum = (tensor[index].flatten().double().tolist() for tensor in inputs)
        want = loops(mode, g, momentum[0] if momentum else g, 0.9, 4.0, 0.25)
        assert x[index].flatten().tolist() == pytest.approx(want, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("mode", ["none", "m", "n"])
def test_the_library_kernel_is_right(mode: str, dtype: str) -> None:
    asked = problem(3, 5, 37, dtype, mode)
    verdict = verify(LIBRARY.build(asked, LIBRARY.Config(), fingerprint("cpu")), OP, asked, "cpu", seed=2)
    assert verdict.failure == ""


def scaled_inputs(dtype: torch.dtype, device: str) -> Tensor:
    """Matrices of norms from 1e-30 to 1e30, a zero one, one with a NaN, one with an inf."""
    rng = torch.Generator().manual_seed(0)
    u = torch.randn(8, 20, 72, generator=rng)
    u *= torch.tensor([1e-30, 1e-9, 1.0, 1e5, 1e30, 0.0, 1.0, 1.0])[:, None, None]
    u[6, 3, 4], u[7, 0, 0] = math.nan, math.inf
    return u.to(dtype).to(device)


def check_scales(launch: Any, u: Tensor) -> None:
    x = torch.full(u.shape, math.nan, dtype=torch.float32, device=u.device)
    launch(addresses(u.unbind()), x, 8.0, 0.0)
    norms = torch.linalg.vector_norm(u[:5].double(), dim=(-2, -1), keepdim=True)
    torch.testing.assert_close(x[:5].double(), 8.0 * u[:5].double() / norms, rtol=2e-6, atol=1e-9)
    assert torch.equal(x[5], torch.zeros_like(x[5])) and bool(x[6:].isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_scale_matters_and_non_finite_stays_in_its_matrix(dtype: torch.dtype) -> None:
    asked = problem(8, 20, 72, str(dtype).removeprefix("torch."), "none", "float32")
    check_scales(LIBRARY.build(asked, LIBRARY.Config(), fingerprint("cpu")), scaled_inputs(dtype, "cpu"))


def test_each_kernel_says_where_it_does_not_run() -> None:
    asked = problem(1, 8, 8, "float32", "none")
    assert "GPU" in (TRITON.refusal(asked, fingerprint("cpu")) or "")
    assert "address" in (LIBRARY.refusal(asked, H200) or "")
    for spec, device in ((TRITON, H200), (LIBRARY, fingerprint("cpu"))):
        assert spec.serves(asked, device)
        assert "none, m, n" in (spec.refusal(problem(1, 8, 8, "float32", "w"), device) or "")


@pytest.mark.parametrize("shape", [(1, 8192, 28672), (64, 128, 128), (1, 1, 1), (5000, 16, 16)], ids=str)
def test_programs_fill_the_device_and_never_lack_a_block(shape: tuple[int, int, int]) -> None:
    batch, m, n = shape
    for config in TRITON.legal_space(problem(*shape, "bfloat16", "n"), H200):
        count = programs(problem(*shape, "bfloat16", "n"), config, H200)
        assert 1 <= count <= max(1, m * n // config.block)
        assert count == max(1, m * n // config.block) or count * batch >= config.per_sm * H200.sm_count


def interpreter_launch(asked: Problem, config: MomentumConfig) -> Any:
    """The launch with Triton's interpreter in the compiled kernels' place."""
    program = TRITON.build(asked, config, FOUR_SM)

    def runner(one: Any) -> Any:
        return lambda grid, *arguments: one.function[grid](*arguments, **one.constants)

    return program.host(*map(runner, program.kernels))


CASES = [problem(*shape, dtype, mode, dtype)
         for shape in ((3, 5, 37), (2, 64, 70), (1, 1, 1)) for dtype in ("float32", "float16") for mode in "mn"]


@pytest.mark.parametrize("asked", CASES if INTERPRETED in os.environ else [], ids=Problem.label)
def test_in_the_interpreter(asked: Problem) -> None:
    assert verify(interpreter_launch(asked, SMALL), OP, asked, "cpu", seed=3).failure == ""


@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRETED in os.environ else [], ids=str)
def test_scales_in_the_interpreter(dtype: torch.dtype) -> None:
    launch = interpreter_launch(problem(8, 20, 72, "float32", "none", "float32"), SMALL)
    check_scales(launch, scaled_inputs(dtype, "cpu"))


@pytest.mark.parametrize("device", [A100, H200, B200], ids=lambda device: device.arch)
def test_aligned_matrices_move_16_bytes_at_once_and_others_are_not_taken_to_be(device: DeviceFingerprint) -> None:
    pytest.importorskip("triton")
    from dmuon_tune.backends.triton import _compile, cubin_resources

    program = TRITON.build(problem(8, 2048, 5464, "bfloat16", "n"), MomentumConfig(block=2048), device)
    for one in program.kernels:
        binary = _compile(one, device, one.aligned)
        found = cubin_resources(binary.asm["cubin"])
        assert found["spill_bytes"] == 0 and found["registers"] <= 128
        loads = re.findall(r"ld\.global\.(v4\.b32|b16)", binary.asm["ptx"])
        wide, narrow = loads.count("v4.b32"), loads.count("b16")
        assert wide and narrow == 8 * wide  # the same elements on either path


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", ["none", "m", "n"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_a_gpu(dtype: str, mode: str) -> None:
    from dmuon_tune.measure.build import compile_kernel

    for shape in ((3, 5, 37), (5, 300, 512)):
        asked = problem(*shape, dtype, mode)
        launch = compile_kernel(TRITON, asked, MomentumConfig(), fingerprint("cuda")).launch
        assert verify(launch, OP, asked, "cuda", seed=4).failure == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_any_address_and_scale_on_a_gpu() -> None:
    from dmuon_tune.measure.build import compile_kernel

    asked = problem(8, 20, 72, "float32", "none", "float32")
    launch = compile_kernel(TRITON, asked, MomentumConfig(), fingerprint("cuda")).launch
    u = scaled_inputs(torch.float32, "cuda")
    check_scales(launch, u)
    aligned = torch.empty(8, 20, 72, device="cuda")
    launch(addresses(u.unbind()), aligned, 8.0, 0.0)
    storage = torch.empty(8, 20 * 72 + 1, device="cuda")
    odd = [row[1:].view(20, 72).copy_(matrix) for row, matrix in zip(storage, u, strict=True)]
    out = torch.empty(8 * 20 * 72 + 1, device="cuda")[1:].view(8, 20, 72)
    launch(addresses(odd), out, 8.0, 0.0)
    torch.testing.assert_close(out, aligned, rtol=1e-6, atol=0.0, equal_nan=True)
