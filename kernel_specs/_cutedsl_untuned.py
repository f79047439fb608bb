"""Which configurations of the CuTe DSL symmetric product suit a problem before anything was measured."""

from __future__ import annotations

import math
from dataclasses import replace

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem

from ._cutedsl_space import SymmetricConfig, illegality, rounds_of, tile_count

# A configuration; the share of peak that its products of two operands reach, and of one by itself (gram); what storing
# a tile costs beside them in columns of k. Fitted to 213 timings of 49 products (H200, 2026-11-29 and 30; of 8192 also
# warm, in turn, on a throttled card). The choice's time over the best measured one's is 1.006 in the geometric mean of
# the 45 products where it was measured (with one speed a configuration and no clusters it was 1.073).
_UNTUNED = (
    (SymmetricConfig(128, 256, 64, 3), 1.0, 0.9, 450),
    (SymmetricConfig(128, 256, 64, 3, split=2), 1.0, 1.03, 450),
    (SymmetricConfig(128, 256, 64, 3, cluster=2), 1.0, 0.9, 450),
    (SymmetricConfig(128, 192, 64, 4), 1.0, 1.0, 500),
    (SymmetricConfig(192, 192, 64, 3, 3, split=2), 1.0, 0.97, 200),
    (SymmetricConfig(128, 128, 64, 5, pingpong=True), 1.0, 0.62, 200),
    (SymmetricConfig(128, 128, 64, 5, pingpong=True, split=2), 0.93, 0.93, 200),
    (SymmetricConfig(128, 128, 64, 5, pingpong=True, cluster=2), 1.0, 0.7, 200),
    (SymmetricConfig(128, 192, 64, 4, pingpong=True), 0.97, 1.0, 300),
    (SymmetricConfig(128, 192, 64, 4, pingpong=True, cluster=2), 0.99, 1.0, 300),
    (SymmetricConfig(128, 128, 64, 4, split=3), 0.5, 0.5, 700),
    (SymmetricConfig(64, 128, 64, 4, 1, blocks_per_sm=2), 0.75, 0.75, 300),
    (SymmetricConfig(64, 64, 64, 5, 1, blocks_per_sm=2), 0.5, 0.5, 300),
)
_EXCHANGE = 400  # columns of k that an exchange of sums costs
_OFF_LINES = 0.8  # of the speed of turns is left where rows do not start on 128-byte lines: L2 reads two for one
_APART_K = 4096  # from here on blocks that take turns and share nothing drift apart along one operand's k


def heuristic(problem: Problem, device: DeviceFingerprint) -> SymmetricConfig:
    """The first of ``seeds``."""
    return seeds(problem, device)[0]


def seeds(problem: Problem, device: DeviceFingerprint) -> list[SymmetricConfig]:
    """A few configurations, cut to the problem's size, those first whose rounds over the triangle cost the least."""

    def cost(entry: tuple[SymmetricConfig, float, float, int]) -> float:
        config, of_two, of_one, store = entry
        speed = of_one if problem.op == "gram" else of_two
        if config.pingpong and (problem.k if problem.layout == "row" else problem.m) % 64:
            speed *= _OFF_LINES
        if config.pingpong and problem.op == "gram" and config.cluster == config.split == 1:
            speed *= min(1.0, math.sqrt(_APART_K / problem.k))
        tiles = problem.batch * tile_count(problem.m, config.tile_m * config.cluster, config.tile_n)
        rounds, rest, _ = rounds_of(tiles, device.sm_count * config.blocks_per_sm, config)
        columns = rounds * (problem.k / speed + store)
        if rest:
            columns += problem.k / speed / config.split + store + _EXCHANGE
        return config.blocks_per_sm * config.tile_m * config.tile_n * columns

    cut = [(_cut(problem, config), of_two, of_one, store) for config, of_two, of_one, store in _UNTUNED]
    legal = [entry for entry in cut if illegality(problem, entry[0], device) is None]
    return [config for config, *_ in sorted(legal or cut, key=cost)]


def _cut(problem: Problem, config: SymmetricConfig) -> SymmetricConfig:
    """The configuration with no more stages than k fills and no more tile rows a group than m has."""
    rows = config.tile_m * config.cluster
    group = next(size for size in (8, 4, 1) if size == 1 or size // 2 * rows < problem.m)
    stages = max(2, min(config.stages, -(-(problem.k // config.split) // config.tile_k) + 1))
    return replace(config, group=group, stages=stages)
