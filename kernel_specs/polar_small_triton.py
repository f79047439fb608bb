"""``polar_small`` in Triton: one program a matrix, which holds X (plain form) or XXᵀ and a polynomial of it (Gram)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem
from dmuon_tune.space import choice
from dmuon_tune.spec import KernelSpec

from ._triton import POINTERS, TritonKernel, TritonProgram, overlap
from .polar_small import input_scale, misshapen, schedule

MAX_M = 128
MIN_BLOCK = 16  # tl.dot's least extent
WARP = 32
MAX_ELEMENTS = 2**31
LEAST_COLUMNS = 64
LEAST_SHARE = 512  # columns of a matrix for which another block is worth the waits
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


def heuristic(problem: Problem, device: DeviceFingerprint) -> PolarConfig:
    """What was fastest on an H200: all in registers where X fits; else wide blocks, shared where rows are long."""
    block_m, whole = padded(problem.m), padded(problem.n)
    if whole <= 2 * block_m:
        for warps in (4, 8) if block_m >= 64 else (1, 2, 4):  # from 64 rows on four warps multiply together
            plain = PolarConfig("plain", whole, warps, 1)
            if illegality(problem, plain, device) is None:
                return plain
    if block_m < 64:
        return PolarConfig("gram", min(whole, 64), {16: 1, 32: 2}[block_m], 2)
    fitting = [b for b in (16, 8, 4, 2) if b * problem.batch <= device.sm_count and b * LEAST_SHARE <= problem.n]
    return PolarConfig("gram", min(whole, 128), 8, 1 if block_m == 128 else 2, next(iter(fitting), 1))


def build(problem: Problem, config: PolarConfig, device: DeviceFingerprint) -> TritonProgram:
    from . import _triton_polar as functions

    steps, restarts = schedule(problem)
    overlaps, options = overlap(device) if config.blocks == 1 else (False, {"launch_cooperative_grid": True})
    types = {
        "u": POINTERS[problem.dtype], "coefficients": "*fp32", "y": POINTERS[problem.out_dtype], "norm_factor": "fp32",
    }
    constants = {
        "M": problem.m, "N": problem.n, "TALL": problem.layout == "col", "BLOCK_M": padded(problem.m),
        "BLOCK_N": config.block_n, "STEPS": steps, "SCALE": input_scale(problem.m),
    }
    if config.form == "gram":
        types["scratch"] = "*fp32"
        constants |= {"RESTART": restarts[0] if restarts else 0, "BLOCKS": config.blocks, "BATCH": problem.batch}
    constants["OVERLAP"] = overlaps
    function = functions.plain if config.form == "plain" else functions.gram
    kernel = TritonKernel(function, types, constants, config.warps, config.stages, ("u", "y"), options)
    return TritonProgram((kernel,), _host(problem, config))


def _host(problem: Problem, config: PolarConfig) -> Callable[..., Any]:
    grid = (problem.batch * config.blocks, 1, 1)
    rounds = 1 + len(schedule(problem)[1])
    shares = problem.batch * config.blocks
    scratch_elements = problem.batch + shares + rounds * shares * padded(problem.m) ** 2

    def host(run: Callable[..., None]) -> Callable[..., None]:
        def plain(u: Any, coefficients: Any, y: Any, norm_factor: float) -> None:
            run(grid, u, coefficients, y, norm_factor)

        def gram(u: Any, coefficients: Any, y: Any, norm_factor: float) -> None:
            run(grid, u, coefficients, y, norm_factor, coefficients)  # no scratch is touched

        def shared(u: Any, coefficients: Any, y: Any, norm_factor: float) -> None:
            scratch = coefficients.new_empty(scratch_elements)  # each call its own: calls may overlap on two streams
            scratch[: problem.batch].zero_()
            run(grid, u, coefficients, y, norm_factor, scratch)

        return plain if config.form == "plain" else gram if config.blocks == 1 else shared

    return host


KERNEL = KernelSpec(
    "polar_small", "triton", PolarConfig, refusal, build,
    (__name__, *(f"{__package__}.{name}" for name in ("polar_small", "_triton", "_triton_overlap", "_triton_polar"))),
    illegality, heuristic,
)
