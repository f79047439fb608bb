"""What the CuTe DSL kernel of whole recurrences serves, and what it needs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.errors import UsageError
from dmuon_tune.problem import Problem

from .polar_small import schedule

HALF = 128  # rows of a block: two warpgroups of 64
CHUNK = 128  # columns of an accumulator
POLAR_THREADS = 256
MAX_EXTENT = 256
SOURCES = (
    __name__,
    *(f"{__package__}.{name}" for name in (
        "_cutedsl_polar", "_cutedsl_polar_memory", "_cutedsl_polar_ops", "polar_small",
    )),
)


@dataclass(frozen=True)
class PolarConfig:
    pass


def halves(problem: Problem) -> int:
    """Blocks of a matrix's cluster."""
    return -(-problem.m // HALF)


def chunks(problem: Problem) -> int:
    return -(-problem.n // CHUNK)


def smem_bytes(problem: Problem) -> int:
    """All of X and three quarters of XXᵀ (its one square for one block) in fp16; sums; two barriers."""
    blocks = halves(problem)
    return (blocks * chunks(problem) * CHUNK + (2 * blocks - 1) * HALF) * HALF * 2 + 4 * 4 * (2 + 8) + 16


def refusal(problem: Problem, device: DeviceFingerprint) -> str | None:
    if device.arch != "sm_90":
        return f"the CuTe DSL kernel uses Hopper's clusters and wgmma and runs on sm_90 alone, not on {device.arch}"
    try:
        schedule(problem)
    except UsageError as error:
        return str(error)
    if problem.n < problem.m or problem.k != problem.m:
        return f"m must be the short side and k equal to it, not m {problem.m}, n {problem.n}, k {problem.k}"
    if problem.n > MAX_EXTENT:
        return f"X is held in shared memory, which takes {MAX_EXTENT} columns, not {problem.n}"
    return None


def program(problem: Problem, config: PolarConfig, device: DeviceFingerprint) -> Any:
    """A KernelSpec's build: the body for this problem, ready for the backend."""
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when cutlass is imported; it would pick sm_100a by itself
    from ._cutedsl_polar import Program

    return Program(problem, config, device.sm_count)
