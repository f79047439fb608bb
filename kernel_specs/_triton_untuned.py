"""Which configuration of a Triton product suits a problem before anything was measured."""

from __future__ import annotations

from typing import Any

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import ITEM_BYTES, Problem
from dmuon_tune.space import enumerate_space

from ._triton_tiles import ACCUMULATORS, TILE, WARP, TileConfig, apply_shape, illegality, symmetric_shape

BYTES_PER_CYCLE, MULTIPLY_ADDS_PER_CYCLE = 43, 2048  # of an H200's multiprocessor: L2 reads, dense fp16


def heuristic(problem: Problem, device: DeviceFingerprint) -> TileConfig | None:
    """The legal configuration ranked first by tiles a multiprocessor (several run at once), each as long as the slower
    of its multiply-adds and its loads through L2; None where none is legal.

    Measured on an H200: a mirrored store leaves no registers for more than 64 sums a thread, and 64×64 tiles, which
    wait for loads most, want 128 of k at a time.
    """
    shape = apply_shape(problem) if problem.op == "apply" else symmetric_shape(problem)
    roomy = ACCUMULATORS // 2 + 1 if shape.mirrored else ACCUMULATORS + 1

    def rank(config: TileConfig) -> tuple[Any, ...]:
        area = config.tile_m * config.tile_n
        share = max(1.0, shape.tiles(config) * problem.batch / device.sm_count)
        loads = (config.tile_m + config.tile_n) * ITEM_BYTES[problem.dtype] / BYTES_PER_CYCLE
        tile_k, stages = (128, 3) if area == TILE[0] ** 2 else (64, 4 if area <= 128 * 128 else 3)
        return (
            area // (config.warps * WARP) > roomy, share * max(area / MULTIPLY_ADDS_PER_CYCLE, loads),
            config.warps != (4 if area <= 64 * 128 else 8), abs(config.tile_k - tile_k), abs(config.stages - stages),
            config.panel != (8 if shape.rows >= 8192 else 1), -config.tile_m if shape.mirrored else config.tile_m,
        )

    legal = [c for c in enumerate_space(TileConfig) if illegality(problem, c, device, shape) is None]
    return min(legal, key=rank, default=None)
