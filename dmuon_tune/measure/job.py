"""What a measuring process is asked to do and what it answers, in terms that cross a process boundary."""

from __future__ import annotations

import json
import os
import traceback
from dataclasses import dataclass, field
from struct import Struct
from typing import Any, ClassVar

from dmuon_tune.cache import CacheEntry
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Recipe

LOG_CHARS = 4000  # kept of a traceback and of a process's output: enough for a compiler's complaint
TURN = Struct("i")


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

    @classmethod
    def of(cls, entry: CacheEntry) -> Entrant:
        return cls(entry.key.kernel, entry.config, int(entry.measurement.resources.get("launches_per_window", 1)))


@dataclass(frozen=True)
class RaceJob:
    """Time one problem's finalists against each other; those that ``prepare_s`` seconds are too short to compile, but
    for the first two, are left out. ``stepwise``: each window is waited for before the next begins, so that one that
    fails is known; a GPU idles between them."""

    problem: Problem
    entrants: tuple[Entrant, ...]
    device: str
    seed: int
    prepare_s: float
    stepwise: bool = False


@dataclass(frozen=True)
class RaceResult:
    """How each entrant ended, in order; None for one that was left out. The resources of those that are ok hold
    ``race``: its windows, and whether it ties with the fastest."""

    measurements: tuple[Measurement | None, ...]


@dataclass(frozen=True)
class BuildJob:
    """Compile one configuration for a GPU of ``target``'s architecture, which need not be here, or for this CPU, and
    keep the artefact in ``folder``.

    What is there and whole is kept, unless ``rebuild``. Where another process builds the same, ``wait`` for it. The
    code is that of the artefact whose key is ``like``, where there is one.
    """

    device: ClassVar[str] = "cpu"  # it launches nothing
    seed: ClassVar[int] = 0

    folder: str
    kernel_name: str
    problem: Problem
    config: dict[str, Any] = field(hash=False)
    target: DeviceFingerprint
    rebuild: bool = False
    wait: bool = False
    like: str = ""


@dataclass(frozen=True)
class Built:
    """How that ended: ``built``, ``kept``, ``busy`` (another process builds it) or ``failed``; its size, or why."""

    state: str
    detail: str = ""


AnyJob = Job | ChainJob | RaceJob | BuildJob
Outcome = Measurement | RaceResult | Built


def kernels_of(job: AnyJob) -> set[tuple[str, Problem, str]]:
    """(Kernel, problem, configuration) of all that a process compiles for a job, unless it did for an earlier one."""
    if isinstance(job, ChainJob):
        found = [(pick.kernel, pick.problem, pick.config) for pick in job.recipe.picks]
    elif isinstance(job, RaceJob):
        found = [(entrant.kernel_name, job.problem, entrant.config) for entrant in job.entrants]
    else:
        found = [(job.kernel_name, job.problem, job.config)]
    return {(name, problem, json.dumps(config, sort_keys=True)) for name, problem, config in found}


def last_traceback() -> str:
    """The end of the traceback of the exception that is being handled."""
    return traceback.format_exc()[-LOG_CHARS:]


def write_turn(file: int, entrant: int | None) -> None:
    """Keep in an open file which entrant of a race is at work, for whoever outlives this process."""
    os.pwrite(file, TURN.pack(-1 if entrant is None else entrant), 0)


def read_turn(file: int) -> int | None:
    """The entrant that ``write_turn`` kept."""
    (entrant,) = TURN.unpack(os.pread(file, TURN.size, 0))
    return None if entrant < 0 else entrant
