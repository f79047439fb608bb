"""Synthetic records: a model of waves, tiles and stages over the CuTe DSL symmetric product's space, with noise."""

from __future__ import annotations

import numpy as np

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernel
from dmuon_tune.kernel_specs._cutedsl_space import SymmetricConfig, rounds_of, tile_count
from dmuon_tune.problem import Problem
from dmuon_tune.search.proposer import legal_space
from dmuon_tune.search.record import Record
from dmuon_tune.space import axes

H200 = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 62914560, 150109880320)
NOISE = 0.01  # of a time: about what one measurement differs from the next


def synthetic(m: int, k: int, seed: int, keep: int) -> Record:
    """``gram`` at m×k; ``keep`` of its configurations, every seventh failed."""
    problem, spec, rng = Problem("gram", 1, m, m, k), kernel("gram.cutedsl"), np.random.default_rng(seed)
    legal = spec.legal_space(problem, H200)
    legal = [legal[row] for row in sorted(rng.permutation(len(legal))[:keep])]
    times: list[float | None] = [
        round(model_us(problem, config) * float(np.exp(rng.normal(0, NOISE))), 3) for config in legal
    ]
    for row in rng.permutation(len(legal))[: len(legal) // 7]:
        times[row] = None
    return Record(
        problem.label(), spec.name, H200.name, {name: list(values) for name, values in axes(spec.Config).items()},
        legal_space(spec.Config, legal).indices.tolist(), times, [],
    )


def model_us(problem: Problem, config: SymmetricConfig) -> float:
    """Rounds over the triangle's tiles at the speed that tile, stages and schedule allow."""
    tiles = tile_count(problem.m, config.tile_m * config.cluster, config.tile_n)
    rounds, rest, _ = rounds_of(tiles, H200.sm_count * config.blocks_per_sm, config)
    speed = min(1.0, (config.tile_m * config.tile_n / (128 * 192)) ** 0.45)
    speed *= 1 - 0.35 / (config.stages * config.tile_k / 64) ** 1.2
    speed *= {1: 0.9, 4: 1.0, 8: 0.98}[config.group] * (0.85 if config.warpgroups == 1 else 1.0)
    store = 350 / config.buffers**0.4 * (0.5 if config.pingpong else 1.0)
    columns = rounds * (problem.k / speed + store)
    if rest:
        columns += problem.k / speed / config.split + store + 400
    share = config.tile_m * config.tile_n * config.cluster / (1.9 if config.cluster == 2 else 1.0)
    return 1e-6 * config.blocks_per_sm**0.92 * share * columns
