"""What the CuTe DSL kernel of whole recurrences serves, and what it needs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem
from dmuon_tune.space import choice

from .polar_small import misshapen

HALF = 128  # rows of a block: two warpgroups of 64
CHUNK = 128  # columns of an accumulator
POLAR_THREADS = 256
MAX_CHUNKS = 2  # accumulators of a thread: 64 registers each
SOURCES = (
    __name__,
    *(f"{__package__}.{name}" for name in (
        "_cutedsl_polar", "_cutedsl_polar_exchange", "_cutedsl_polar_memory", "_cutedsl_polar_ops", "polar_small",
    )),
)


@dataclass(frozen=True)
class PolarConfig:
    """``column_groups`` blocks share a matrix's columns; each then holds and multiplies its own, and XXᵀ is summed.

    ``blocks_per_sm`` are resident at once.
    """

    column_groups: int = choice(1, (1, 2, 4))
    blocks_per_sm: int = choice(1, (1, 2))


def halves(problem: Problem) -> int:
    """Blocks that share a matrix's rows."""
    return -(-problem.m // HALF)


def chunks(problem: Problem, config: PolarConfig) -> int:
    """Accumulators that a block's columns take."""
    return -(-problem.n // (CHUNK * config.column_groups))


def smem_bytes(problem: Problem, config: PolarConfig) -> int:
    """X's columns and three quarters of XXᵀ (its one square where m ≤ 128) in fp16; sums; four barriers."""
    across = halves(problem)
    matrices = (across * chunks(problem, config) * CHUNK + (2 * across - 1) * HALF) * HALF * 2
    return matrices + 8 * (across * config.column_groups + POLAR_THREADS // 32) + 32


def refusal(problem: Problem, device: DeviceFingerprint) -> str | None:
    if device.arch != "sm_90":
        return f"the CuTe DSL kernel uses Hopper's clusters and wgmma and runs on sm_90 alone, not on {device.arch}"
    wrong = misshapen(problem)
    if wrong is not None:
        return wrong
    if problem.m > 2 * HALF or problem.n > MAX_CHUNKS * CHUNK * 2 * halves(problem):
        return f"X is held in shared memory, of up to 256×1024 or 128×512 elements, not {problem.m}×{problem.n}"
    return None


def illegality(problem: Problem, config: PolarConfig, device: DeviceFingerprint) -> str | None:
    if chunks(problem, config) > MAX_CHUNKS:
        return f"a block's share of {problem.n} columns by {config.column_groups} exceeds {MAX_CHUNKS * CHUNK}"
    if config.column_groups > 2 * halves(problem):
        return f"the sums of XXᵀ have {2 * halves(problem)} parts, fewer than {config.column_groups} column groups"
    fewer = PolarConfig(max(1, config.column_groups // 2))
    idle = (config.column_groups - 1) * chunks(problem, config) * CHUNK >= problem.n
    if config.column_groups > 1 and idle and chunks(problem, fewer) <= MAX_CHUNKS:
        return f"{config.column_groups} column groups leave one of them without a column of {problem.n}"
    if config.blocks_per_sm > 1 and halves(problem) * chunks(problem, config) > 1:
        return f"{halves(problem) * chunks(problem, config)} accumulators leave no registers to a second block"
    if config.blocks_per_sm > 1 and problem.batch * halves(problem) * config.column_groups <= device.sm_count:
        return f"{problem.batch} matrices fill no multiprocessor twice"
    return None


def program(problem: Problem, config: PolarConfig, device: DeviceFingerprint) -> Any:
    """A KernelSpec's build: the body for this problem, ready for the backend."""
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when cutlass is imported; it would pick sm_100a by itself
    from ._cutedsl_polar import Program

    return Program(problem, config, device.sm_count)
