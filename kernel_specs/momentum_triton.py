"""``momentum`` in Triton: two passes over a batch, its sums of squares added in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem
from dmuon_tune.spec import KernelSpec

from ._triton import POINTERS, TritonKernel, TritonProgram, overlap
from ._triton_momentum_space import MomentumConfig, illegality, refusal
from ._triton_momentum_untuned import heuristic

PARTS = ("_triton", "_triton_overlap", "_triton_momentum", "_triton_momentum_space", "momentum")


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
    (__name__, *(f"{__package__}.{part}" for part in PARTS)), illegality, heuristic,
)
