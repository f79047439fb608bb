"""What a measuring process is asked to do and what it answers, in terms that cross a process boundary."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any

from dmuon_tune.measurement import Measurement
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


@dataclass(frozen=True)
class Entrant:
    """A finalist of a race; ``launches`` of it make a window, as its screening found."""

    kernel_name: str
    config: dict[str, Any] = field(hash=False)
    launches: int


@dataclass(frozen=True)
class RaceJob:
    """Time one problem's finalists against each other; those that ``prepare_s`` seconds are too short to compile, but
    for the first two, are left out."""

    problem: Problem
    entrants: tuple[Entrant, ...]
    device: str
    seed: int
    prepare_s: float


@dataclass(frozen=True)
class RaceResult:
    """How each entrant ended, in order; None for one that was left out. The resources of those that are ok hold
    ``race``: its windows, and whether it ties with the fastest."""

    measurements: tuple[Measurement | None, ...]


AnyJob = Job | ChainJob | RaceJob
Outcome = Measurement | RaceResult


def last_traceback() -> str:
    """The end of the traceback of the exception that is being handled."""
    return traceback.format_exc()[-LOG_CHARS:]
