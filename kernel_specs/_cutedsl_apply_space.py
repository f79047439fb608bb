"""What the CuTe DSL ``apply`` serves: its configurations, their limits, and the untuned choice by shape."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Any

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import ITEM_BYTES, Problem
from dmuon_tune.space import choice

from .apply import EPILOGUES

TILE_K = 64  # elements of the inner axis a stage: the 128 bytes that the widest swizzle spans
WARPGROUPS = 2  # that multiply; a third one loads
THREADS = 128 * (WARPGROUPS + 1)
STAGED_ROWS, STAGED_BYTES, STAGED_BUFFERS = 64, 128, 2  # a piece of the result in shared memory, a warpgroup's
ALIGNMENT_BYTES = 16  # of every stride and address; CUDA driver API, cuTensorMapEncodeTiled
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232  # a thread, of 3 × 168 (three warpgroups)
OTHER_REGISTERS = 40  # a thread: addresses, descriptors, pipeline state, a piece of the result
UPDATE_REGISTERS = 72  # the same, with a weight's elements of two pieces
MAX_MATRIX_ELEMENTS = 2**31 - 1  # offsets inside one matrix are int32
SOURCES = (
    __name__,
    f"{__package__}._cutedsl_apply",
    f"{__package__}._cutedsl_apply_epilogue",
)


@dataclass(frozen=True)
class ApplyConfig:
    """``tile_m``×``tile_n`` of the result as it is stored, ``stages`` of loads in flight.

    ``cooperative`` warpgroups share a tile's rows; ``pingpong`` ones have a tile each, so that one stores while the
    other multiplies. Blocks of a cluster (``cluster_m``×``cluster_n`` neighbouring tiles) share the operand they have
    in common, loaded once. ``group`` rows of tiles are walked together, which keeps their operands in L2.
    """

    tile_m: int = choice(128, (64, 128, 256))
    tile_n: int = choice(256, (64, 128, 192, 256))
    stages: int = choice(4, (3, 4, 5, 6, 8))
    schedule: str = choice("cooperative", ("cooperative", "pingpong"))
    cluster_m: int = choice(1, (1, 2))
    cluster_n: int = choice(1, (1, 2))
    group: int = choice(8, (1, 4, 8, 16))


def result_shape(problem: Problem) -> tuple[int, int]:
    """Rows and columns of the result as it is stored."""
    return (problem.m, problem.n) if problem.layout == "row" else (problem.n, problem.m)


def rows_per_warpgroup(config: ApplyConfig) -> int:
    return config.tile_m if config.schedule == "pingpong" else config.tile_m // WARPGROUPS


def smem_bytes(config: ApplyConfig) -> int:
    """Shared memory of a block: the stages, the staged pieces of the result, two barriers a stage."""
    stages = config.stages * (config.tile_m + config.tile_n) * TILE_K * 2
    return stages + WARPGROUPS * STAGED_BUFFERS * STAGED_ROWS * STAGED_BYTES + 16 * config.stages


def refusal(problem: Problem, device: DeviceFingerprint) -> str | None:
    if device.arch != "sm_90":
        return f"the CuTe DSL kernel uses Hopper's TMA and wgmma and runs on sm_90 alone, not on {device.arch}"
    if problem.epilogue not in EPILOGUES:
        return f"apply has the epilogues {', '.join(EPILOGUES)}, asked {problem.epilogue!r}"
    if problem.dtype not in ("float16", "bfloat16"):
        return f"the CuTe DSL kernel multiplies float16 and bfloat16, not {problem.dtype}"
    if problem.k != problem.m:
        return f"apply has k = m; got m {problem.m}, k {problem.k}"
    for axis in ("m", "n") if problem.layout == "row" else ("m",):
        extent = getattr(problem, axis)
        if extent * ITEM_BYTES[problem.dtype] % ALIGNMENT_BYTES:
            rule = f"in {problem.layout} layout {axis} must be a multiple of 8, not {extent}"
            return f"TMA reads and writes rows of whole {ALIGNMENT_BYTES} bytes: {rule}"
    if problem.m * max(problem.m, problem.n) > MAX_MATRIX_ELEMENTS:
        return f"one matrix has more than {MAX_MATRIX_ELEMENTS} elements"
    return None


def illegality(problem: Problem, config: ApplyConfig, device: DeviceFingerprint) -> str | None:
    rows, cols = result_shape(problem)
    if rows_per_warpgroup(config) % 64:
        return f"warpgroups multiply 64 rows at a time: tile_m {config.tile_m} is too low to share"
    accumulators = rows_per_warpgroup(config) * config.tile_n // 128
    others = UPDATE_REGISTERS if problem.epilogue == "w" else OTHER_REGISTERS
    if accumulators + others > CONSUMER_REGISTERS:
        return f"{accumulators} accumulators do not fit in the {CONSUMER_REGISTERS} registers a thread has"
    needed, limit = smem_bytes(config), device.smem_per_block_bytes
    if needed > limit:
        return f"{needed} bytes of shared memory exceed the block's {limit}"
    if config.cluster_m * config.cluster_n > 2:
        return "a cluster is of at most two blocks"
    for axis, cluster, tile, extent in (
        ("row", config.cluster_m, config.tile_m, rows), ("column", config.cluster_n, config.tile_n, cols),
    ):
        if cluster > 1 and extent <= tile:
            return f"one {axis} of tiles leaves a cluster of {cluster} nothing to share"
    if config.schedule == "pingpong" and problem.has_c and config.tile_n // TILE_K > config.stages:
        return f"{config.stages} stages do not hold the {config.tile_n} columns of the added term"
    if config.stages > 3 and (config.stages - 1) * TILE_K >= problem.k + TILE_K:
        return f"{config.stages} stages of {TILE_K} are more than k {problem.k} fills"
    if config.group > 1 and config.group // 2 * config.tile_m * config.cluster_m >= rows:
        return f"a group of {config.group} tile rows is no different from a smaller one at {rows} rows"
    return None


# tile_m, tile_n, stages, schedule, and the share of peak that its products reach, relative to the first. With
# EPILOGUE_K these rank 37 timings of nine shapes right but for near ties (H200, 2026-11-29).
_UNTUNED = (
    (128, 256, 4, "cooperative", 1.0),
    (128, 192, 4, "pingpong", 1.0),
    (128, 128, 6, "pingpong", 0.97),
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


def program(problem: Problem, config: ApplyConfig, device: DeviceFingerprint) -> Any:
    """A KernelSpec's build: the body for this problem, ready for the backend."""
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when cutlass is imported; it would pick sm_100a by itself
    from ._cutedsl_apply import Program

    return Program(problem, config, device.sm_count)
