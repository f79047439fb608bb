"""What the Triton ``momentum`` serves: its configurations and their limits."""

from __future__ import annotations

from dataclasses import dataclass

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem
from dmuon_tune.space import choice

from .momentum import MODES

MAX_PER_THREAD = 32  # elements: two sums of each are kept in registers


@dataclass(frozen=True)
class MomentumConfig:
    """``block`` elements are read at once by ``warps``; each multiprocessor gets about ``per_sm`` programs a pass."""

    block: int = choice(1024, (1024, 2048, 4096))
    warps: int = choice(8, (4, 8))
    per_sm: int = choice(8, (2, 4, 8))


def refusal(problem: Problem, device: DeviceFingerprint) -> str | None:
    if device.kind != "cuda":
        return "the Triton kernels run on NVIDIA GPUs alone"
    if problem.epilogue not in MODES:
        return f"epilogue must be one of {', '.join(MODES)}, not {problem.epilogue}"
    return None


def illegality(problem: Problem, config: MomentumConfig, device: DeviceFingerprint) -> str | None:
    if config.block > MAX_PER_THREAD * 32 * config.warps:
        return f"more than {MAX_PER_THREAD} elements a thread"
    return None
