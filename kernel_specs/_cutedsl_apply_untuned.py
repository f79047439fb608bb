"""Which configurations of the CuTe DSL ``apply`` suit a problem before anything was measured."""

from __future__ import annotations

import math
from dataclasses import replace

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem

from ._cutedsl_apply_space import TILE_K, ApplyConfig, illegality, result_shape

# tile_m, tile_n, stages, schedule, and the share of peak that its products reach, relative to the first. Fitted to 143
# timings of 32 products (H200, 2026-11-29 and 30): the choice's time over the best measured one's is 1.010 in the
# geometric mean, 1.11 at worst (1.017 with 0.97 for the third).
_UNTUNED = (
    (128, 256, 4, "cooperative", 1.0),
    (128, 192, 4, "pingpong", 1.0),
    (128, 128, 6, "pingpong", 0.91),
    (128, 64, 8, "cooperative", 0.85),
    (64, 64, 8, "pingpong", 0.6),
)
EPILOGUE_K = {"none": 60, "c": 60, "w": 600}  # a tile's epilogue takes as long as products of this inner length
RING_SHARE = 0.94  # speed of a ping-pong kernel while most of its ring is taken by the added term


def heuristic(problem: Problem, device: DeviceFingerprint) -> ApplyConfig | None:
    """The configuration whose waves of tiles take the least time; None where none of these few is legal."""
    return next(iter(_ranked(problem, device)), None)


def seeds(problem: Problem, device: DeviceFingerprint) -> list[ApplyConfig]:
    """The untuned table's configurations by the time of their waves; then the two best with and without a cluster."""
    ranked = _ranked(problem, device)
    return ranked + [replace(config, cluster_m=3 - config.cluster_m) for config in ranked[:2]]


def _ranked(problem: Problem, device: DeviceFingerprint) -> list[ApplyConfig]:
    candidates = [_completed(problem, device, *entry) for entry in _UNTUNED]
    legal = [pair for pair in candidates if illegality(problem, pair[1], device) is None]
    return [config for _, config in sorted(legal, key=lambda pair: pair[0])]


def _completed(
    problem: Problem, device: DeviceFingerprint, tile_m: int, tile_n: int, stages: int, schedule: str, speed: float
) -> tuple[float, ApplyConfig]:
    """(cost, configuration): blocks share an operand where there is more than one wave of them."""
    rows, cols = result_shape(problem)
    tiles = problem.batch * math.ceil(rows / tile_m) * math.ceil(cols / tile_n)
    waves = math.ceil(tiles / device.sm_count)
    exposed = waves if schedule == "cooperative" else 1  # the other warpgroup multiplies meanwhile, but at the end
    if problem.has_c and schedule == "pingpong" and tile_n // TILE_K > stages // 2:
        speed *= RING_SHARE
    cost = tile_m * tile_n * (waves * problem.k / speed + exposed * EPILOGUE_K[problem.epilogue])
    cluster_m = 2 if waves > 1 and math.ceil(rows / tile_m) % 2 == 0 else 1
    group = next(size for size in (8, 4, 1) if size == 1 or size // 2 * tile_m * cluster_m < rows)
    filled = min(stages, -(-problem.k // TILE_K) + 1)
    stages = next(size for size in (8, 6, 5, 4, 3) if size == 3 or size <= filled)
    return cost, ApplyConfig(tile_m, tile_n, stages, schedule, cluster_m, 1, group)
