"""What the CuTe DSL kernel of a whole span serves: its configurations and their limits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem
from dmuon_tune.space import choice

from . import _cutedsl_space as product
from ._cutedsl_space import CHUNK, SymmetricConfig, block_limits, tile_count
from .gram_span import WORK_SQUARES, misshapen

MAX_M = 2048  # at 1×2048 separate products were as fast (docs/span.md)
SOURCES = (
    __name__, *product.SOURCES,
    *(f"{__package__}.{part}" for part in ("_cutedsl_span", "_cutedsl_span_phases", "gram_span")),
)


@dataclass(frozen=True)
class SpanConfig(SymmetricConfig):
    """A symmetric product's configuration, and ``rounds``: the batch is worked on in so many, near-equal.

    The device's blocks are divided among a round's matrices, so a matrix's products wait for the blocks of that matrix
    alone; a block that waits leaves its multiprocessor to the one beside it. Blocks share neither turns nor a tile's k.
    """

    tile_m: int = choice(64, (64, 128, 192, 256))
    tile_k: int = choice(64, (64,))
    stages: int = choice(4, (2, 3, 4, 5, 6, 8, 12))
    warpgroups: int = choice(1, (1, 2, 3))
    group: int = choice(8, (8,))
    blocks_per_sm: int = choice(2, (1, 2))
    pingpong: bool = choice(False, (False,))
    split: int = choice(1, (1,))
    rounds: int = choice(1, (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64))


def flight(problem: Problem, config: SpanConfig) -> int:
    """Matrices in flight: of one round."""
    return -(-problem.batch // config.rounds)


def squares(problem: Problem, matrices: int) -> Problem:
    """One product of the span as a symmetric product over all slots of ``work`` that so many matrices use."""
    return Problem("gemm_symmetric", WORK_SQUARES * matrices, *(problem.m,) * 3, problem.dtype, problem.dtype, "row")


def members(problem: Problem, config: SpanConfig, sm_count: int) -> int:
    """Clusters of blocks that work on one matrix: no more than a phase of two products has tiles."""
    most = 2 * tile_count(problem.m, config.tile_m * config.cluster, config.tile_n)
    return min(sm_count * config.blocks_per_sm // (flight(problem, config) * config.cluster), most)


def refusal(problem: Problem, device: DeviceFingerprint) -> str | None:
    reason = misshapen(problem)
    if reason is not None:
        return reason
    if problem.m % 8:
        return f"TMA reads and writes rows of whole 16 bytes: m must be a multiple of 8, not {problem.m}"
    if problem.m > MAX_M:
        return f"squares of more than {MAX_M} rows fill the device product by product, not {problem.m}"
    return product.refusal(squares(problem, 1), device)


def illegality(problem: Problem, config: SpanConfig, device: DeviceFingerprint) -> str | None:
    reason = block_limits(config, device)
    if reason is not None:
        return reason
    if config.stages < config.tile_n // CHUNK:
        return f"{config.stages} stages do not hold a tile's {config.tile_n} columns of C"
    if config.cluster > 1 and problem.m <= config.tile_m:
        return f"m {problem.m} is one tile high: no block to share columns with"
    matrices = flight(problem, config)
    if config.rounds != -(-problem.batch // matrices):
        return f"{problem.batch} matrices in rounds of {matrices} need fewer than {config.rounds}"
    if matrices * config.cluster > device.sm_count * config.blocks_per_sm:
        return f"{matrices} matrices in flight are more than the device's blocks"
    return None


def program(problem: Problem, config: SpanConfig, device: DeviceFingerprint) -> Any:
    """A KernelSpec's build: the body for this problem, ready for the backend."""
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when cutlass is imported; it would pick sm_100a by itself
    from ._cutedsl_span import Program

    return Program(problem, config, device.sm_count)
