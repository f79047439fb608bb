"""What the CuTe DSL symmetric product serves: its configurations and their limits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dmuon_tune.device import MAX_REGISTERS_PER_THREAD, REGISTERS_PER_BLOCK, DeviceFingerprint
from dmuon_tune.problem import EPILOGUES, Problem
from dmuon_tune.space import choice

CHUNK = 64  # rows and columns of what a warpgroup stores at a time: one 128-byte swizzled line a row
RESERVED_SMEM_BYTES = 1024  # CUDA C++ Programming Guide, compute capability 9.0: taken by the system from every block
# A thread of the producer's warpgroup and of a consumer's, by number of consumers: parts of 512 for each lane.
REGISTERS = {2: (40, 232), 3: (32, 160)}
OTHER_REGISTERS = 40  # a thread: addresses, descriptors, pipeline state; a chunk's values take those of done products
SOURCES = (
    __name__,
    *(f"{__package__}._cutedsl_{part}" for part in ("symmetric", "walk", "exchange", "epilogue")),
)
MAX_MATRIX_ELEMENTS = 2**31 - 1  # offsets inside one matrix are int32


@dataclass(frozen=True)
class SymmetricConfig:
    """``tile_m``×``tile_n`` of the result a step, ``tile_k`` of the inner axis a stage.

    ``warpgroups`` share a tile's rows, or (``pingpong``) take whole tiles in turn, so that one stores while the other
    multiplies; ``group`` tile rows are walked together, which keeps their operands in L2; ``blocks_per_sm`` are
    resident at once. ``buffers`` chunks of a result are on their way to memory at once. ``cluster`` blocks work on
    tiles one below the other and share their columns' operand by multicast; ``split`` blocks share one tile's k.
    """

    tile_m: int = choice(128, (64, 128, 192, 256))
    tile_n: int = choice(128, (64, 128, 192, 256))
    tile_k: int = choice(64, (64, 128))
    stages: int = choice(4, (2, 3, 4, 5, 6))
    warpgroups: int = choice(2, (1, 2, 3))
    group: int = choice(8, (1, 4, 8))
    blocks_per_sm: int = choice(1, (1, 2))
    pingpong: bool = choice(False, (False, True))
    buffers: int = choice(1, (1, 2))
    cluster: int = choice(1, (1, 2))
    split: int = choice(1, (1, 2, 3, 4))


def tile_warpgroups(config: SymmetricConfig) -> int:
    """Warpgroups that work on one tile."""
    return 1 if config.pingpong else config.warpgroups


def accumulators(config: SymmetricConfig) -> int:
    """fp32 accumulators a thread."""
    return config.tile_m * config.tile_n // (128 * tile_warpgroups(config))


def threads(config: SymmetricConfig) -> int:
    """The consumers and what loads for them: two warps beside one warpgroup, else a warpgroup of few registers."""
    return 192 if config.warpgroups == 1 else 128 * (config.warpgroups + 1)


def registers(config: SymmetricConfig) -> int:
    """Registers a consumer thread may have: a multiprocessor's four parts hold 512 a lane for their warps."""
    if config.warpgroups > 1:
        return REGISTERS[config.warpgroups][1] if config.blocks_per_sm == 1 else 0
    warps = -(-config.blocks_per_sm * threads(config) // 128)
    return min(MAX_REGISTERS_PER_THREAD, REGISTERS_PER_BLOCK // 128 // warps // 8 * 8)


def ring_bytes(config: SymmetricConfig) -> int:
    return config.stages * (config.tile_m + config.tile_n) * config.tile_k * 2


def smem_bytes(config: SymmetricConfig) -> int:
    """Shared memory of a block: the stages, each warpgroup's chunks and their mirror images, the barriers."""
    chunks = config.warpgroups * config.buffers
    return ring_bytes(config) + chunks * 2 * CHUNK * CHUNK * 2 + 16 * (config.stages + chunks)


def refusal(problem: Problem, device: DeviceFingerprint) -> str | None:
    if device.arch != "sm_90":
        return f"the CuTe DSL kernel uses Hopper's TMA and wgmma and runs on sm_90 alone, not on {device.arch}"
    if problem.op == "gram" and problem.epilogue != "none":
        return f"gram has no epilogue, asked {problem.epilogue!r}"
    if problem.epilogue not in EPILOGUES:
        return f"a product's epilogues are {', '.join(EPILOGUES)}, asked {problem.epilogue!r}"
    if problem.n != problem.m:
        return f"a symmetric product has n = m; got m {problem.m}, n {problem.n}"
    for name in (problem.dtype, problem.out_dtype):
        if name not in ("float16", "bfloat16"):
            return f"the CuTe DSL kernel multiplies and writes float16 and bfloat16, not {name}"
    contiguous, extent = ("k", problem.k) if problem.layout == "row" else ("m", problem.m)
    if extent % 8:
        rule = f"in {problem.layout} layout {contiguous} must be a multiple of 8, not {extent}"
        return f"TMA reads rows of whole 16 bytes: {rule}"
    if problem.has_c and problem.m % 8:
        return f"TMA reads rows of whole 16 bytes: m must be a multiple of 8 beside a c, not {problem.m}"
    if problem.m * max(problem.m, problem.k) > MAX_MATRIX_ELEMENTS:
        return f"one matrix has more than {MAX_MATRIX_ELEMENTS} elements"
    return None


def illegality(problem: Problem, config: SymmetricConfig, device: DeviceFingerprint) -> str | None:
    return block_limits(config, device) or _schedule_limits(problem, config, device)


def block_limits(config: SymmetricConfig, device: DeviceFingerprint) -> str | None:
    """What a block of this shape cannot be, whatever it multiplies."""
    if config.pingpong and config.warpgroups != 2:
        return f"warpgroups take turns in pairs, not {config.warpgroups}"
    if config.tile_m % (64 * tile_warpgroups(config)):
        return f"{config.warpgroups} warpgroups take 64 rows each: tile_m {config.tile_m} is no multiple of that"
    if accumulators(config) + OTHER_REGISTERS > registers(config):
        return f"{accumulators(config)} accumulators do not fit in the {registers(config)} registers a thread has"
    needed, limit = smem_bytes(config), device.smem_per_block_bytes
    if needed > limit:
        return f"{needed} bytes of shared memory exceed the block's {limit}"
    if config.blocks_per_sm * (needed + RESERVED_SMEM_BYTES) > limit + RESERVED_SMEM_BYTES:
        return f"{config.blocks_per_sm} blocks of {needed} bytes of shared memory do not fit on one multiprocessor"
    if config.split > 1 and config.cluster > 1:
        return "a cluster shares tiles' columns or a tile's k, not both"
    if config.split > 1 and config.tile_m * config.tile_n * 4 > ring_bytes(config):
        return f"the stages' {ring_bytes(config)} bytes do not hold a tile's partial sums"
    return None


def _schedule_limits(problem: Problem, config: SymmetricConfig, device: DeviceFingerprint) -> str | None:
    """What is pointless for this problem: another configuration does the same."""
    k_tiles = -(-problem.k // config.tile_k)
    if config.stages > 2 and (config.stages - 1) * config.tile_k >= problem.k // config.split + config.tile_k:
        return f"{config.stages} stages of {config.tile_k} are more than k {problem.k} fills"
    if config.split > 1 and k_tiles < 2 * config.split:
        return f"k {problem.k} has too few tiles of {config.tile_k} for {config.split} blocks"
    tiles = problem.batch * tile_count(problem.m, config.tile_m * config.cluster, config.tile_n)
    blocks = device.sm_count * config.blocks_per_sm
    rounds, rest, clusters = rounds_of(tiles, blocks, config)
    if config.split > 1 and not 0 < rest <= clusters:
        return f"{tiles} tiles leave {rest} for a last round, not one for some of {clusters} clusters"
    if config.split > 2 and rounds:
        return f"clusters of {config.split} do not fill the device for the {rounds} rounds before the last"
    if config.pingpong and tiles * config.cluster <= device.sm_count:
        return f"{tiles * config.cluster} tiles leave nothing to take turns with"
    if config.cluster > 1 and problem.m <= config.tile_m:
        return f"m {problem.m} is one tile high: no block to share columns with"
    if config.group > 1 and config.group // 2 * config.tile_m * config.cluster >= problem.m:
        return f"a group of {config.group} tile rows is no different from a smaller one at m {problem.m}"
    return None


@lru_cache(4096)  # legality asks for few tiles, of thousands of configurations
def tile_count(m: int, tile_m: int, tile_n: int) -> int:
    """How many tile_m×tile_n tiles touch the lower triangle of an m×m matrix."""
    cols = -(-m // tile_n)
    return sum(min(-(-(row + 1) * tile_m // tile_n), cols) for row in range(-(-m // tile_m)))


def rounds_of(tiles: int, blocks: int, config: SymmetricConfig) -> tuple[int, int, int]:
    """(rounds of whole tiles, tiles left for a last round that shares k, clusters) of a walk by so many blocks.

    Blocks that share no k walk all tiles, whole: nothing is left for a last round.
    """
    clusters = blocks // (config.cluster * config.split)
    if config.split == 1:
        return -(-tiles // clusters), 0, min(tiles, clusters)
    rounds, rest = divmod(tiles, clusters * config.split)
    return rounds, rest, clusters if rounds else min(rest, clusters)


def program(problem: Problem, config: SymmetricConfig, device: DeviceFingerprint) -> Any:
    """A KernelSpec's build: the body for this problem, ready for the backend."""
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when cutlass is imported; it would pick sm_100a by itself
    from ._cutedsl_symmetric import Program

    return Program(problem, config, device.sm_count)
