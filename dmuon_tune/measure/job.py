"""What a measuring process is asked to do, in terms that cross a process boundary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Recipe

LOG_CHARS = 4000  # kept of a traceback and of a process's output: enough for a compiler's complaint


@dataclass(frozen=True)
class Job:
    """Measure one configuration of one kernel; ``seed`` makes the random inputs."""

    kernel_name: str
    problem: Problem
    config: dict[str, Any] = field(hash=False)
    device: str
    seed: int


@dataclass(frozen=True)
class ChainJob:
    """Measure one way to orthogonalize a group; the recipe's picks name the kernels of every piece's products."""

    recipe: Recipe
    device: str
    seed: int


AnyJob = Job | ChainJob
