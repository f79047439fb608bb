"""What the CuTe DSL ``apply`` serves: its configurations and their limits."""

from __future__ import annotations

import os
from dataclasses import dataclass
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


def staged_cols(problem: Problem) -> int:
    """Columns of a piece of the result that TMA stores."""
    return STAGED_BYTES // ITEM_BYTES[problem.out_dtype]


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
    cols, piece = result_shape(problem)[1], staged_cols(problem)
    if piece < TILE_K and cols <= piece and problem.epilogue != "w":
        return f"TMA stores {problem.out_dtype} in pieces of {piece} columns: there must be more than one, not {cols}"
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
    for axis, piece, tile, extent in (
        ("rows", STAGED_ROWS, config.tile_m, rows), ("columns", staged_cols(problem), config.tile_n, cols),
    ):
        # CuTe gives an axis of one piece the stride 0: a second, all beyond the matrix, would overwrite the first.
        if tile > piece >= extent and problem.epilogue != "w":
            return f"{extent} {axis} are one piece of {piece}, which a tile of {tile} reaches beyond"
    if config.schedule == "pingpong" and problem.has_c and config.tile_n // TILE_K > config.stages:
        return f"{config.stages} stages do not hold the {config.tile_n} columns of the added term"
    if config.stages > 3 and (config.stages - 1) * TILE_K >= problem.k + TILE_K:
        return f"{config.stages} stages of {TILE_K} are more than k {problem.k} fills"
    if config.group > 1 and config.group // 2 * config.tile_m * config.cluster_m >= rows:
        return f"a group of {config.group} tile rows is no different from a smaller one at {rows} rows"
    return None


def program(problem: Problem, config: ApplyConfig, device: DeviceFingerprint) -> Any:
    """A KernelSpec's build: the body for this problem, ready for the backend."""
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when cutlass is imported; it would pick sm_100a by itself
    from ._cutedsl_apply import Program

    return Program(problem, config, device.sm_count)
