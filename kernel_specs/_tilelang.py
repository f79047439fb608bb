"""What every TileLang kernel shares: the tile configuration, what is refused, what is legal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import ITEM_BYTES, Problem
from dmuon_tune.space import choice

TILE_M = (64, 128, 256)
TILE_N = (64, 128, 192, 256)
TILE_K = (32, 64, 128)
CPU_MAX_TILE = 128  # an fp32 accumulator of 64 KiB: a core's second-level cache, and its stack, hold it
MAX_ELEMENTS = 2**31  # TileLang indexes tensors with int32
TMA_ALIGNMENT_BYTES = 16  # of every stride; CUDA driver API, cuTensorMapEncodeTiled
STATIC_SMEM_BYTES = 1024  # barriers, and the alignment of the swizzled tiles


@dataclass(frozen=True)
class TileConfig:
    """One block's share: a tile_m×tile_n result in steps of tile_k, ``stages`` of loads in flight.

    ``threads`` compute; on sm_90 and later TileLang adds a warpgroup that loads. ``panel`` rows of tiles are swept
    together, column by column, so that blocks running at the same time share operands in L2. The CPU target takes the
    tile extents alone.
    """

    tile_m: int = choice(128, TILE_M)
    tile_n: int = choice(128, TILE_N)
    tile_k: int = choice(64, TILE_K)
    stages: int = choice(3, (2, 3, 4, 5))
    threads: int = choice(256, (128, 256))
    panel: int = choice(1, (1, 8))


@dataclass(frozen=True)
class Shape:
    """A kernel's launch geometry: rows×cols results with inner length k, and how many tiles cover one of them."""

    rows: int
    cols: int
    k: int
    staged_tiles: int  # result tiles held in shared memory by the epilogue
    strides: tuple[int, ...]  # inner extents of the operands as stored: their row strides in elements
    tiles: Callable[[TileConfig], int]


def triangle_tiles(extent: int, tile_m: int, tile_n: int) -> int:
    """How many tile_m×tile_n tiles touch the lower triangle (with diagonal) of a square matrix."""
    return sum((min(row + tile_m, extent) - 1) // tile_n + 1 for row in range(0, extent, tile_m))


def symmetric_shape(problem: Problem) -> Shape:
    inner = problem.k if problem.layout == "row" else problem.m
    return Shape(
        problem.m, problem.m, problem.k, 2, (inner,),
        lambda config: triangle_tiles(problem.m, config.tile_m, config.tile_n),
    )


def apply_shape(problem: Problem) -> Shape:
    rows, cols = (problem.m, problem.n) if problem.layout == "row" else (problem.n, problem.m)
    return Shape(
        rows, cols, problem.m, 1, (problem.m, cols),
        lambda config: math.ceil(rows / config.tile_m) * math.ceil(cols / config.tile_n),
    )


def refusal(problem: Problem, device: DeviceFingerprint, shape: Shape, epilogues: tuple[str, ...]) -> str | None:
    """Why TileLang does not serve the problem on this device, or None."""
    if problem.out_dtype != problem.dtype:
        return f"TileLang writes its operands' dtype: {problem.dtype} in, {problem.out_dtype} asked"
    if problem.epilogue not in epilogues:
        return f"{problem.op} has no epilogue {problem.epilogue!r}; it takes {', '.join(epilogues)}"
    if problem.op != "apply" and problem.n != problem.m:
        return f"{problem.op} has an m×m result: n must equal m, not {problem.n}"
    if problem.batch * max(shape.rows * shape.cols, shape.rows * shape.k, shape.cols * shape.k) >= MAX_ELEMENTS:
        return "a tensor has 2^31 elements or more and TileLang indexes with int32; cut the batch"
    if device.kind == "cpu" and problem.dtype == "bfloat16":
        return "TileLang's CPU target has no bfloat16; use float32 or float16"
    if device.kind == "cuda" and problem.dtype == "float32":
        return "tensor cores would round float32 to tf32; use float16, bfloat16 or the library"
    if device.kind == "cuda" and device.sm < 80:
        return f"needs tensor cores of sm_80 or later, not {device.arch}"
    return None


def uses_tma(problem: Problem, shape: Shape, device: DeviceFingerprint) -> bool:
    """Whether the tensor memory accelerator can load every operand: sm_90 or later, strides of 16 bytes."""
    item_bytes = ITEM_BYTES[problem.dtype]
    return device.sm >= 90 and all(stride * item_bytes % TMA_ALIGNMENT_BYTES == 0 for stride in shape.strides)


def switches(problem: Problem, shape: Shape, device: DeviceFingerprint) -> dict[str, Any]:
    """Compiler switches for a problem.

    Where TMA cannot load an operand, TileLang feeds wgmma from cp.async without a proxy fence after the last waits;
    warp-level tensor-core instructions read such tiles safely.
    """
    if device.kind == "cpu" or uses_tma(problem, shape, device):
        return {}
    return {"tl.disable_wgmma": True, "tl.disable_warp_specialized": True}


def smem_bytes(problem: Problem, config: TileConfig, shape: Shape) -> int:
    """Dynamic shared memory of a block: the pipeline's operand tiles, whose place the epilogue's result tiles take."""
    pipeline = config.stages * (config.tile_m + config.tile_n) * config.tile_k
    staging = shape.staged_tiles * config.tile_m * config.tile_n
    return ITEM_BYTES[problem.dtype] * max(pipeline, staging)


def illegality(problem: Problem, config: TileConfig, device: DeviceFingerprint, shape: Shape) -> str | None:
    """Why a configuration cannot run, or would repeat a smaller one; None where it is legal.

    TileLang 0.1.15 drops the k tail where tile_k is no multiple of its instruction's k (issue 2381), leaves columns
    unwritten where tile_n does not divide over the warps (2537) and is wrong for wgmma with tile_n ≡ 8 mod 16 (2593).
    """
    if config.tile_k % 16 or config.tile_n % 64 or config.tile_m % 64 or config.threads % 128:
        return "tile_m, tile_n must be multiples of 64, tile_k of 16, threads of 128 (TileLang issues 2381, 2537, 2593)"
    for name, extent, choices in (
        ("tile_m", shape.rows, TILE_M), ("tile_n", shape.cols, TILE_N), ("tile_k", shape.k, TILE_K),
    ):
        tile = getattr(config, name)
        if any(extent <= smaller < tile for smaller in choices):
            return f"{name} {tile}: a smaller tile covers all {extent}"
    if device.kind == "cpu":
        return _cpu_illegality(config)
    if config.stages > max(2, math.ceil(shape.k / config.tile_k)):
        return f"{config.stages} stages, but fewer steps along k"
    if config.panel > 1 and shape.rows <= config.panel * config.tile_m:
        return f"a panel of {config.panel} tiles is the whole matrix"
    smem = smem_bytes(problem, config, shape) + STATIC_SMEM_BYTES
    if smem > device.smem_per_block_bytes:
        return f"needs {smem} bytes of shared memory a block, the device has {device.smem_per_block_bytes}"
    accumulators = config.tile_m * config.tile_n // config.threads
    most = 128 if _mma_operands_in_registers(problem, shape, device) else 192
    if accumulators > most:
        return f"{accumulators} accumulators a thread leave too few of its 255 registers"
    return None


def _cpu_illegality(config: TileConfig) -> str | None:
    default = TileConfig()
    if (config.stages, config.threads, config.panel) != (default.stages, default.threads, default.panel):
        return "the CPU target has no stages, threads or panels: they stay at their defaults"
    if max(config.tile_m, config.tile_n) > CPU_MAX_TILE:
        return f"a tile above {CPU_MAX_TILE} outgrows a core's cache"
    return None


def _mma_operands_in_registers(problem: Problem, shape: Shape, device: DeviceFingerprint) -> bool:
    """mma.sync takes its operands from registers; wgmma (sm_90 alone) reads them from shared memory."""
    return device.sm // 10 != 9 or not uses_tma(problem, shape, device)


def program(
    function: Any, problem: Problem, config: TileConfig, device: DeviceFingerprint, shape: Shape
) -> tuple[Any, dict[str, Any], int]:
    """What the backend compiles: the function, the compiler's switches, dynamic shared memory in bytes."""
    smem = smem_bytes(problem, config, shape) if device.kind == "cuda" else 0
    return function, switches(problem, shape, device), smem
