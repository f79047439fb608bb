"""What the Triton products share: the tile configuration, what is refused, what is legal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dmuon_tune.device import MAX_REGISTERS_PER_THREAD, DeviceFingerprint
from dmuon_tune.problem import ITEM_BYTES, Problem
from dmuon_tune.space import choice

SOURCES = tuple(f"{__package__}.{name}" for name in ("_triton", "_triton_overlap", "_triton_products", "_triton_tiles"))
TILE = (64, 128, 256)
TILE_K = (32, 64, 128)
WARP = 32
ACCUMULATORS = MAX_REGISTERS_PER_THREAD // 2  # a thread's; the rest holds addresses and operands
STATIC_SMEM_BYTES = 1024  # barriers
MAX_ELEMENTS = 2**31  # of one matrix, indexed with int32


@dataclass(frozen=True)
class TileConfig:
    """One program's share: a tile_m×tile_n result in steps of tile_k, ``stages`` of loads in flight.

    ``panel`` rows of tiles are swept together, column by column, so that programs running at the same time share
    operands in L2.
    """

    tile_m: int = choice(128, TILE)
    tile_n: int = choice(128, TILE)
    tile_k: int = choice(64, TILE_K)
    stages: int = choice(3, (2, 3, 4, 5))
    warps: int = choice(8, (4, 8))
    panel: int = choice(1, (1, 4, 8))


@dataclass(frozen=True)
class Shape:
    """rows×cols results with inner length k, and how many tiles cover one; ``mirrored`` results are stored twice."""

    rows: int
    cols: int
    k: int
    mirrored: bool
    tiles: Callable[[TileConfig], int]


def lower_tiles(extent: int, config: TileConfig) -> int:
    """Tiles of a lower triangle (with diagonal) cut in steps of the tile's longer side."""
    step = max(config.tile_m, config.tile_n)
    steps = math.ceil(extent / step)
    return step // config.tile_m * (step // config.tile_n) * steps * (steps + 1) // 2


def symmetric_shape(problem: Problem) -> Shape:
    return Shape(problem.m, problem.m, problem.k, True, lambda config: lower_tiles(problem.m, config))


def apply_shape(problem: Problem) -> Shape:
    rows, cols = (problem.m, problem.n) if problem.layout == "row" else (problem.n, problem.m)
    return Shape(
        rows, cols, problem.m, False,
        lambda config: math.ceil(rows / config.tile_m) * math.ceil(cols / config.tile_n),
    )


def refusal(problem: Problem, device: DeviceFingerprint, shape: Shape, epilogues: tuple[str, ...]) -> str | None:
    """Why Triton does not serve the problem on this device, or None."""
    if device.kind != "cuda":
        return "the Triton kernels run on a GPU"
    if problem.epilogue not in epilogues:
        return f"{problem.op} in Triton has no epilogue {problem.epilogue!r}; it takes {', '.join(epilogues)}"
    if problem.op != "apply" and problem.n != problem.m:
        return f"{problem.op} has an m×m result: n must equal m, not {problem.n}"
    if problem.dtype == "float32":
        return "tensor cores would round float32 to tf32; use float16, bfloat16 or the library"
    if max(shape.rows * shape.cols, shape.rows * shape.k, shape.cols * shape.k) >= MAX_ELEMENTS:
        return "a matrix has 2^31 elements or more and is indexed with int32"
    return None


def smem_bytes(problem: Problem, config: TileConfig) -> int:
    """Upper bound of a program's shared memory: the loads in flight, or the result turned for its mirrored store."""
    pipeline = config.stages * (config.tile_m + config.tile_n) * config.tile_k * ITEM_BYTES[problem.dtype]
    staging = config.tile_m * config.tile_n * ITEM_BYTES[problem.out_dtype]
    return max(pipeline, staging + staging // 8) + STATIC_SMEM_BYTES


def illegality(problem: Problem, config: TileConfig, device: DeviceFingerprint, shape: Shape) -> str | None:
    """Why a configuration cannot run, or would repeat a smaller one; None where it is legal."""
    for name, extent, choices in (
        ("tile_m", shape.rows, TILE), ("tile_n", shape.cols, TILE), ("tile_k", shape.k, TILE_K),
    ):
        tile = getattr(config, name)
        if any(extent <= smaller < tile for smaller in choices):
            return f"{name} {tile}: a smaller tile covers all {extent}"
    if config.stages > max(2, math.ceil(shape.k / config.tile_k)):
        return f"{config.stages} stages, but fewer steps along k"
    if config.panel > 1 and shape.rows <= config.panel * config.tile_m:
        return f"a panel of {config.panel} tiles is the whole matrix"
    smem = smem_bytes(problem, config)
    if smem > device.smem_per_block_bytes:
        return f"needs {smem} bytes of shared memory a block, the device has {device.smem_per_block_bytes}"
    accumulators = config.tile_m * config.tile_n // (config.warps * WARP)
    if accumulators > ACCUMULATORS + 1:
        return f"{accumulators} accumulators a thread leave too few of its {MAX_REGISTERS_PER_THREAD} registers"
    return None
