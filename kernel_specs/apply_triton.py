"""``apply`` in Triton: Y = αQX (+ βX), one program a tile of Y as it is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem
from dmuon_tune.spec import KernelSpec

from . import _triton_tiles
from ._triton import POINTERS, TritonKernel, TritonProgram, overlap
from ._triton_tiles import TileConfig, apply_shape
from ._triton_untuned import heuristic


def refusal(problem: Problem, device: DeviceFingerprint) -> str | None:
    return _triton_tiles.refusal(problem, device, apply_shape(problem), ("none", "c"))


def illegality(problem: Problem, config: TileConfig, device: DeviceFingerprint) -> str | None:
    return _triton_tiles.illegality(problem, config, device, apply_shape(problem))


def build(problem: Problem, config: TileConfig, device: DeviceFingerprint) -> TritonProgram:
    from ._triton_products import apply

    shape = apply_shape(problem)
    tiles = shape.tiles(config)
    types = {
        "q": POINTERS[problem.dtype], "x": POINTERS[problem.dtype], "y": POINTERS[problem.out_dtype], "alpha": "fp32",
        "beta": "fp32",
    }
    overlaps, options = overlap(device)
    constants = {
        "ROWS": shape.rows, "COLS": shape.cols, "K": shape.k, "ROW": problem.layout == "row", "HAS_C": problem.has_c,
        "TILES": tiles, "TILE_M": config.tile_m, "TILE_N": config.tile_n, "TILE_K": config.tile_k,
        "PANEL": config.panel, "OVERLAP": overlaps,
    }
    kernel = TritonKernel(apply, types, constants, config.warps, config.stages, ("q", "x", "y"), options)
    grid = (tiles * problem.batch, 1, 1)

    def host(run: Callable[..., None]) -> Callable[..., None]:
        def launch(q: Any, x: Any, y: Any, alpha: float, beta: float = 0.0) -> None:
            run(grid, q, x, y, alpha, beta)

        return launch

    return TritonProgram((kernel,), host)


KERNEL = KernelSpec(
    "apply", "triton", TileConfig, refusal, build, (__name__, *_triton_tiles.SOURCES), illegality, heuristic
)
