"""What the Triton kernel of whole recurrences serves: its configurations and their limits."""

from __future__ import annotations

from dataclasses import dataclass

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem
from dmuon_tune.space import choice

from .polar_small import misshapen, schedule

MAX_M = 128
MIN_BLOCK = 16  # tl.dot's least extent
WARP = 32
MAX_ELEMENTS = 2**31
LEAST_COLUMNS = 64
ACCUMULATORS = 64  # fp32 sums a thread: with a second result in fp16 and its operands, as many as its registers hold


@dataclass(frozen=True)
class PolarConfig:
    """``block_n`` columns of X are held at a time; all of them in the plain form, which reads X once.

    ``blocks`` share a matrix's columns in the Gram form: they add up R together, twice where there is a restart.
    """

    form: str = choice("gram", ("plain", "gram"))
    block_n: int = choice(64, (16, 32, 64, 128, 256))
    warps: int = choice(8, (1, 2, 4, 8))
    stages: int = choice(2, (1, 2, 3))
    blocks: int = choice(1, (1, 2, 4, 8, 16))


def refusal(problem: Problem, device: DeviceFingerprint) -> str | None:
    if device.kind != "cuda":
        return "the Triton kernel runs on a GPU"
    wrong = misshapen(problem)
    if wrong is not None:
        return wrong
    if problem.m > MAX_M:
        return f"one program holds a matrix of at most {MAX_M} rows, not {problem.m}"
    if problem.m * problem.n >= MAX_ELEMENTS:
        return "a matrix has 2^31 elements or more and is indexed with int32"
    return None


def padded(extent: int) -> int:
    """The block that holds an extent: a power of two, at least 16."""
    return max(MIN_BLOCK, 1 << (extent - 1).bit_length())


def illegality(problem: Problem, config: PolarConfig, device: DeviceFingerprint) -> str | None:
    """Why a configuration cannot run, or would repeat another; None where it is legal."""
    block_m, whole = padded(problem.m), padded(problem.n)
    threads = config.warps * WARP
    if block_m * block_m < 256 * config.warps:
        return f"{config.warps} warps for a result of {block_m}×{block_m}: less than one instruction each"
    if config.block_n > whole:
        return f"block_n {config.block_n}: a smaller block covers all {problem.n}"
    if config.block_n < min(whole, LEAST_COLUMNS):
        return f"fewer than {LEAST_COLUMNS} columns at a time leave the tensor cores waiting"
    if block_m * max(config.block_n, block_m) > ACCUMULATORS * threads:
        return f"{block_m}×{config.block_n} fp32 sums outgrow the registers of {config.warps} warps"
    if config.form == "plain":
        if config.block_n != whole:
            return f"the plain form holds all columns: block_n {whole}"
        if config.stages != 1:
            return "the plain form has no loop to pipeline: one stage"
        if config.blocks != 1:
            return "the plain form holds a matrix in one block"
    elif len(schedule(problem)[1]) > 1:
        return "the Gram form here restarts once at most"
    if config.blocks > 1:
        if config.blocks * problem.batch > device.sm_count:
            return f"{config.blocks} blocks for each of {problem.batch} matrices do not run at once"
        if (config.blocks - 1) * config.block_n >= problem.n:
            return f"{problem.n} columns are fewer than {config.blocks} blocks can share"
    smem = smem_bytes(problem, config)
    if smem > device.smem_per_block_bytes:
        return f"needs {smem} bytes of shared memory a block, the device has {device.smem_per_block_bytes}"
    return None


def smem_bytes(problem: Problem, config: PolarConfig) -> int:
    """An upper bound of a block's shared memory: fp16 operands, and blocks of U in flight."""
    block_m = padded(problem.m)
    square, block = 2 * block_m * block_m, 2 * block_m * config.block_n
    item = {"float32": 4}.get(problem.dtype, 2)
    return 2 * square + 2 * block + config.stages * item * block_m * config.block_n
