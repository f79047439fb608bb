"""``polar_small`` in Triton: one program a matrix, which holds X (plain form) or XXᵀ and a polynomial of it (Gram)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem
from dmuon_tune.spec import KernelSpec

from ._triton import POINTERS, TritonKernel, TritonProgram, overlap
from ._triton_polar_space import PolarConfig, illegality, padded, refusal
from ._triton_polar_untuned import heuristic
from .polar_small import input_scale, schedule

PARTS = ("_triton", "_triton_overlap", "_triton_polar", "_triton_polar_space", "polar_small")


def build(problem: Problem, config: PolarConfig, device: DeviceFingerprint) -> TritonProgram:
    from . import _triton_polar as functions

    steps, restarts = schedule(problem)
    overlaps, options = overlap(device) if config.blocks == 1 else (False, {"launch_cooperative_grid": True})
    types = {
        "u": POINTERS[problem.dtype], "coefficients": "*fp32", "y": POINTERS[problem.out_dtype], "norm_factor": "fp32",
    }
    constants = {
        "M": problem.m, "N": problem.n, "TALL": problem.layout == "col", "BLOCK_M": padded(problem.m),
        "BLOCK_N": config.block_n, "STEPS": steps, "SCALE": input_scale(problem.m),
    }
    if config.form == "gram":
        types["scratch"] = "*fp32"
        constants |= {"RESTART": restarts[0] if restarts else 0, "BLOCKS": config.blocks, "BATCH": problem.batch}
    constants["OVERLAP"] = overlaps
    function = functions.plain if config.form == "plain" else functions.gram
    kernel = TritonKernel(function, types, constants, config.warps, config.stages, ("u", "y"), options)
    return TritonProgram((kernel,), _host(problem, config))


def _host(problem: Problem, config: PolarConfig) -> Callable[..., Any]:
    grid = (problem.batch * config.blocks, 1, 1)
    rounds = 1 + len(schedule(problem)[1])
    shares = problem.batch * config.blocks
    scratch_elements = problem.batch + shares + rounds * shares * padded(problem.m) ** 2

    def host(run: Callable[..., None]) -> Callable[..., None]:
        def plain(u: Any, coefficients: Any, y: Any, norm_factor: float) -> None:
            run(grid, u, coefficients, y, norm_factor)

        def gram(u: Any, coefficients: Any, y: Any, norm_factor: float) -> None:
            run(grid, u, coefficients, y, norm_factor, coefficients)  # no scratch is touched

        def shared(u: Any, coefficients: Any, y: Any, norm_factor: float) -> None:
            scratch = coefficients.new_empty(scratch_elements)  # each call its own: calls may overlap on two streams
            scratch[: problem.batch].zero_()
            run(grid, u, coefficients, y, norm_factor, scratch)

        return plain if config.form == "plain" else gram if config.blocks == 1 else shared

    return host


KERNEL = KernelSpec(
    "polar_small", "triton", PolarConfig, refusal, build,
    (__name__, *(f"{__package__}.{part}" for part in PARTS)), illegality, heuristic,
)
