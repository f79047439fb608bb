"""Which configuration of a TileLang product suits a problem before anything was measured."""

from __future__ import annotations

import math
from typing import Any

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import ITEM_BYTES, Problem
from dmuon_tune.space import enumerate_space

from ._tilelang import Shape, TileConfig, apply_shape, illegality, symmetric_shape

# One multiprocessor of an H200: fp16 multiply-adds a cycle with dense wgmma, and operand bytes a cycle through L2 with
# all of them loading. With these two the model below ranks the measured tiles of 1024 to 8192 right (2026-11-29).
MULTIPLY_ADDS_PER_CYCLE = 2048
L2_BYTES_PER_CYCLE = 43


def heuristic(problem: Problem, device: DeviceFingerprint) -> TileConfig | None:
    """The legal configuration that a model of the device ranks first; None where none is legal.

    On a GPU: whole waves of tiles over the multiprocessors, each as long as the slower of its multiply-adds and its
    loads through L2. On a CPU: the least padded work, then the largest tile.
    """
    shape = apply_shape(problem) if problem.op == "apply" else symmetric_shape(problem)
    legal = [config for config in enumerate_space(TileConfig) if illegality(problem, config, device, shape) is None]
    rank = _cpu_rank if device.kind == "cpu" else _gpu_rank
    return min(legal, key=lambda config: rank(problem, config, device, shape), default=None)


def _gpu_rank(problem: Problem, config: TileConfig, device: DeviceFingerprint, shape: Shape) -> tuple[Any, ...]:
    waves = math.ceil(shape.tiles(config) * problem.batch / device.sm_count)
    multiply_adds = config.tile_m * config.tile_n / MULTIPLY_ADDS_PER_CYCLE
    loads = (config.tile_m + config.tile_n) * ITEM_BYTES[problem.dtype] / L2_BYTES_PER_CYCLE
    padded_k = math.ceil(shape.k / config.tile_k) * config.tile_k
    threads = 128 if config.tile_m * config.tile_n <= 64 * 128 else 256
    panel = 8 if shape.rows >= 8192 else 1
    crowded = config.tile_m * config.tile_n // config.threads > 128  # accumulators a thread; measured only below
    return (
        crowded, waves * max(multiply_adds, loads) * padded_k, abs(config.tile_k - 64), abs(config.stages - 4),
        config.threads != threads, config.panel != panel, config.tile_m,
    )


def _cpu_rank(problem: Problem, config: TileConfig, device: DeviceFingerprint, shape: Shape) -> tuple[Any, ...]:
    padded_k = math.ceil(shape.k / config.tile_k) * config.tile_k
    work = shape.tiles(config) * config.tile_m * config.tile_n * padded_k
    return work, -config.tile_m * config.tile_n, -config.tile_k
