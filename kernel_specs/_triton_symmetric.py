"""Triton programs of ``gram`` and ``gemm_symmetric``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem

from . import _triton_tiles
from ._triton import POINTERS, TritonKernel, TritonProgram, overlap
from ._triton_tiles import TileConfig, lower_tiles

SOURCES = (__name__, *_triton_tiles.SOURCES)


def build(problem: Problem, config: TileConfig, device: DeviceFingerprint) -> TritonProgram:
    """One program a lower tile of each matrix; an absent C is an unread pointer to D."""
    from ._triton_products import symmetric

    tiles = lower_tiles(problem.m, config)
    operand, result = POINTERS[problem.dtype], POINTERS[problem.out_dtype]
    types = {"a": operand, "b": operand, "c": operand if problem.has_c else result, "d": result}
    types |= dict.fromkeys(("alpha", "beta", "gamma"), "fp32")
    overlaps, options = overlap(device)
    constants = {
        "M": problem.m, "K": problem.k, "ROW": problem.layout == "row", "HAS_C": problem.has_c,
        "HAS_I": problem.has_identity, "TILES": tiles, "TILE_M": config.tile_m, "TILE_N": config.tile_n,
        "TILE_K": config.tile_k, "PANEL": config.panel, "OVERLAP": overlaps,
    }
    kernel = TritonKernel(symmetric, types, constants, config.warps, config.stages, ("a", "b", "c", "d"), options)
    return TritonProgram((kernel,), _host(problem, (tiles * problem.batch, 1, 1)))


def _host(problem: Problem, grid: tuple[int, int, int]) -> Callable[..., Any]:
    """The op's own argument list in front of the kernel's."""

    def host(run: Callable[..., None]) -> Callable[..., None]:
        def gram(x: Any, r: Any, alpha: float) -> None:
            run(grid, x, x, r, r, alpha, 0.0, 0.0)

        def gemm(a: Any, b: Any, *rest: Any) -> None:
            tensors, scalars = (rest[:2], rest[2:]) if problem.has_c else ((rest[0], rest[0]), rest[1:])
            beta = scalars[1] if problem.has_c else 0.0
            gamma = scalars[-1] if problem.has_identity else 0.0
            run(grid, a, b, *tensors, scalars[0], beta, gamma)

        return gram if problem.op == "gram" else gemm

    return host
