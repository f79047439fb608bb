"""``momentum`` in Triton: two passes over a batch, its sums of squares added in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import ITEM_BYTES, Problem
from dmuon_tune.space import choice
from dmuon_tune.spec import KernelSpec

from ._triton import POINTERS, TritonKernel, TritonProgram, overlap
from .momentum import MODES

MAX_PER_THREAD = 32  # elements: two sums of each are kept in registers


@dataclass(frozen=True)
class MomentumConfig:
    """``block`` elements are read at once by ``warps``; each multiprocessor gets about ``per_sm`` programs a pass."""

    block: int = choice(1024, (1024, 2048, 4096))
    warps: int = choice(8, (4, 8))
    per_sm: int = choice(8, (2, 4, 8))


def refusal(problem: Problem, device: DeviceFingerprint) -> str | None:
    if device.kind != "cuda":
        return "the Triton kernels run on NVIDIA GPUs alone"
    if problem.epilogue not in MODES:
        return f"epilogue must be one of {', '.join(MODES)}, not {problem.epilogue}"
    return None


def illegality(problem: Problem, config: MomentumConfig, device: DeviceFingerprint) -> str | None:
    if config.block > MAX_PER_THREAD * 32 * config.warps:
        return f"more than {MAX_PER_THREAD} elements a thread"
    return None


def heuristic(problem: Problem, device: DeviceFingerprint) -> MomentumConfig:
    """Few elements a thread, so that all programs run at once; of 16-bit momentum twice as many, whose two or three
    streams else move too little at a time (H200, 2026-11-29)."""
    wide = problem.epilogue != "none" and ITEM_BYTES[problem.dtype] == 2
    return MomentumConfig(block=2048 if wide else 1024)


def programs(problem: Problem, config: MomentumConfig, device: DeviceFingerprint) -> int:
    """How many programs share one matrix: no more than it has blocks."""
    wanted = math.ceil(config.per_sm * device.sm_count / problem.batch)
    return max(1, min(wanted, problem.m * problem.n // config.block))


def build(problem: Problem, config: MomentumConfig, device: DeviceFingerprint) -> TritonProgram:
    import triton
    import triton.language as tl

    from . import _triton_momentum as passes

    count = programs(problem, config, device)
    overlaps, options = overlap(device)
    constants = {
        "MODE": problem.epilogue, "DTYPE": getattr(tl, problem.dtype), "COUNT": problem.m * problem.n,
        "BLOCK": config.block, "PROGRAMS": count, "OVERLAP": overlaps,
    }
    tensors = {"gradients": "*i64", "momenta": "*i64", "partials": "*fp32"}
    first = TritonKernel(passes.squares, {**tensors, "mu": "fp32"}, constants, config.warps, options=options)
    second = TritonKernel(
        passes.scaled,
        {**tensors, "x": POINTERS[problem.out_dtype], "mu": "fp32", "scale": "fp32", "eps": "fp32", "batch": "i32"},
        {**constants, "PADDED": triton.next_power_of_2(count)},
        config.warps,
        aligned=("x",),
        options=options,
    )

    def host(squares: Callable[..., None], scaled: Callable[..., None]) -> Callable[..., Any]:
        grid = (problem.batch * count, 1, 1)

        def momentum(g: Tensor, momenta: Tensor, x: Tensor, mu: float, scale: float, eps: float) -> None:
            partials = torch.empty(problem.batch * count * 2, dtype=torch.float32, device=x.device)
            squares(grid, g, momenta, partials, mu)
            scaled(grid, g, momenta, partials, x, mu, scale, eps, problem.batch)

        def none(g: Tensor, x: Tensor, scale: float, eps: float) -> None:
            momentum(g, g, x, 0.0, scale, eps)

        return none if problem.epilogue == "none" else momentum

    return TritonProgram((first, second), host)


KERNEL = KernelSpec(
    "momentum", "triton", MomentumConfig, refusal, build,
    (__name__, *(f"{__package__}.{name}" for name in ("momentum", "_triton", "_triton_overlap", "_triton_momentum"))),
    illegality, heuristic,
)
