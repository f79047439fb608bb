"""What the CuTe DSL symmetric product serves: its configurations, their limits, and the untuned choice by shape."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from dmuon_tune.device import MAX_REGISTERS_PER_THREAD, REGISTERS_PER_BLOCK, DeviceFingerprint
from dmuon_tune.problem import Problem
from dmuon_tune.space import choice

EPILOGUE_COLS = 32  # columns of a tile staged through shared memory at a time: 64-byte lines for direct stores
PAD = 8  # elements: keeps 16-byte alignment and turns stmatrix's eight rows to different banks
RESERVED_SMEM_BYTES = 1024  # CUDA C++ Programming Guide, compute capability 9.0: taken by the system from every block
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232  # a thread, of 3 × 168 (three warpgroups)
MAX_ACCUMULATORS = 128  # a thread; more of them spill beside the epilogue's rounded copy
OTHER_REGISTERS = 72  # a thread: addresses, descriptors, pipeline state, the epilogue's vectors
SOURCES = (__name__, f"{__package__}._cutedsl_symmetric", f"{__package__}._cutedsl_epilogue")
MAX_MATRIX_ELEMENTS = 2**31 - 1  # offsets inside one matrix are int32


@dataclass(frozen=True)
class SymmetricConfig:
    """``tile_m``×``tile_n`` of the result a step, ``tile_k`` of the inner axis a stage.

    ``warpgroups`` share a tile's rows; ``group`` tile rows are walked together, which keeps their operands in L2;
    ``blocks_per_sm`` are resident at once.
    """

    tile_m: int = choice(128, (64, 128, 256))
    tile_n: int = choice(128, (64, 128, 192, 256))
    tile_k: int = choice(64, (64, 128))
    stages: int = choice(4, (2, 3, 4, 5, 6))
    warpgroups: int = choice(2, (1, 2))
    group: int = choice(8, (1, 4, 8))
    blocks_per_sm: int = choice(1, (1, 2))


def epilogue_rows(config: SymmetricConfig) -> int:
    return 64 * config.warpgroups


def threads(config: SymmetricConfig) -> int:
    """The consumers and the producer: a warp beside one warpgroup, a warpgroup (giving registers up) beside two."""
    return 160 if config.warpgroups == 1 else 384


def registers(config: SymmetricConfig) -> int:
    """Registers a consumer thread may have: a multiprocessor's four parts hold 512 a lane for their warps."""
    if config.warpgroups > 1:
        return CONSUMER_REGISTERS if config.blocks_per_sm == 1 else 0
    warps = -(-config.blocks_per_sm * threads(config) // 128)
    return min(MAX_REGISTERS_PER_THREAD, REGISTERS_PER_BLOCK // 128 // warps // 8 * 8)


def smem_bytes(config: SymmetricConfig) -> int:
    """Shared memory of a block: the stages, the epilogue's two buffers (16-bit elements), two barriers a stage."""
    stages = config.stages * (config.tile_m + config.tile_n) * config.tile_k * 2
    rows = epilogue_rows(config)
    direct, mirror = rows * (EPILOGUE_COLS + PAD) * 2, EPILOGUE_COLS * (rows + PAD) * 2
    return stages + direct + mirror + 16 * config.stages


def refusal(problem: Problem, device: DeviceFingerprint) -> str | None:
    if device.arch != "sm_90":
        return f"the CuTe DSL kernel uses Hopper's TMA and wgmma and runs on sm_90 alone, not on {device.arch}"
    if problem.op == "gram" and problem.epilogue != "none":
        return f"gram has no epilogue, asked {problem.epilogue!r}"
    if problem.n != problem.m:
        return f"a symmetric product has n = m; got m {problem.m}, n {problem.n}"
    for name in (problem.dtype, problem.out_dtype):
        if name not in ("float16", "bfloat16"):
            return f"the CuTe DSL kernel multiplies and writes float16 and bfloat16, not {name}"
    contiguous, extent = ("k", problem.k) if problem.layout == "row" else ("m", problem.m)
    if extent % 8:
        rule = f"in {problem.layout} layout {contiguous} must be a multiple of 8, not {extent}"
        return f"TMA reads rows of whole 16 bytes: {rule}"
    if problem.m * max(problem.m, problem.k) > MAX_MATRIX_ELEMENTS:
        return f"one matrix has more than {MAX_MATRIX_ELEMENTS} elements"
    return None


def illegality(problem: Problem, config: SymmetricConfig, device: DeviceFingerprint) -> str | None:
    if config.tile_m % (64 * config.warpgroups):
        return f"{config.warpgroups} warpgroups take 64 rows each: tile_m {config.tile_m} is no multiple of that"
    accumulators = config.tile_m * config.tile_n // (128 * config.warpgroups)
    if accumulators > MAX_ACCUMULATORS:
        return f"{accumulators} accumulators a thread exceed {MAX_ACCUMULATORS}"
    if accumulators + OTHER_REGISTERS > registers(config):
        return f"{accumulators} accumulators do not fit in the {registers(config)} registers a thread has"
    needed, limit = smem_bytes(config), device.smem_per_block_bytes
    if needed > limit:
        return f"{needed} bytes of shared memory exceed the block's {limit}"
    if config.blocks_per_sm * (needed + RESERVED_SMEM_BYTES) > limit + RESERVED_SMEM_BYTES:
        return f"{config.blocks_per_sm} blocks of {needed} bytes of shared memory do not fit on one multiprocessor"
    if config.stages > 2 and (config.stages - 1) * config.tile_k >= problem.k + config.tile_k:
        return f"{config.stages} stages of {config.tile_k} are more than k {problem.k} fills"
    if config.group > 1 and config.group // 2 * config.tile_m >= problem.m:
        return f"a group of {config.group} tile rows is no different from a smaller one at m {problem.m}"
    return None


def tile_count(m: int, tile_m: int, tile_n: int) -> int:
    """How many tile_m×tile_n tiles touch the lower triangle of an m×m matrix."""
    cols = -(-m // tile_n)
    return sum(min(-(-(row + 1) * tile_m // tile_n), cols) for row in range(-(-m // tile_m)))


# tile_m, tile_n, stages, warpgroups, blocks_per_sm, and an estimate of the share of peak that a full wave reaches.
# What they lead to was the fastest of four configurations tried for each of nine products (H200, 2026-11-29).
_UNTUNED = (
    (128, 256, 3, 2, 1, 1.0),
    (128, 192, 4, 2, 1, 0.97),
    (128, 128, 5, 2, 1, 0.88),
    (64, 128, 4, 1, 2, 0.75),
    (64, 64, 5, 1, 2, 0.5),
)


def heuristic(problem: Problem, device: DeviceFingerprint) -> SymmetricConfig:
    """The tile whose triangle cover wastes the least of its last wave, larger tiles preferred."""

    def cost(entry: tuple[int, int, int, int, int, float]) -> float:
        tile_m, tile_n, _, _, blocks, speed = entry
        slots = device.sm_count * blocks
        waves = math.ceil(problem.batch * tile_count(problem.m, tile_m, tile_n) / slots)
        return waves * blocks * tile_m * tile_n / speed

    tile_m, tile_n, stages, warpgroups, blocks, _ = min(_UNTUNED, key=cost)
    group = next(size for size in (8, 4, 1) if size == 1 or size // 2 * tile_m < problem.m)
    stages = max(2, min(stages, -(-problem.k // 64) + 1))
    return SymmetricConfig(tile_m, tile_n, 64, stages, warpgroups, group, blocks)


def program(problem: Problem, config: SymmetricConfig, device: DeviceFingerprint) -> Any:
    """A KernelSpec's build: the body for this problem, ready for the backend."""
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when cutlass is imported; it would pick sm_100a by itself
    from ._cutedsl_symmetric import Program

    return Program(problem, config, device.sm_count)
