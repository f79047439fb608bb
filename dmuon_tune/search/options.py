"""What a tuning run is asked for, and what it reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from dmuon_tune.backends.probe import resolve_alike
from dmuon_tune.cache import CacheEntry
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.errors import UsageError
from dmuon_tune.problem import DTYPES, Problem
from dmuon_tune.recipe import WEIGHTS_DTYPE, Recipe

from .samplers import DEFAULT, sampler_type


@dataclass(frozen=True)
class Effort:
    """How much a run may take: see TuneOptions' fields of these names."""

    trials: int
    budget_s: float | None
    patience: int | None
    finalists: int


EFFORTS = {
    "quick": Effort(trials=8, budget_s=70.0, patience=8, finalists=3),
    "normal": Effort(trials=80, budget_s=450.0, patience=15, finalists=8),
    "max": Effort(trials=200, budget_s=None, patience=60, finalists=12),
}


@dataclass(frozen=True)
class TuneOptions:
    """How to tune. ``device``: auto, cpu, cuda or cuda:<index>; ``devices`` in its place: several of one kind, each of
    which measures some of the problems. ``dtype``: None for the device's default. ``weights_dtype``: of gradients and
    weights at the chains' ends, besides bf16.

    ``backends``: the DSLs to try (None: all); the library is always measured, as the baseline. ``trials``:
    configurations a problem over all kernels, those in the cache counted (of a chain's ends half as many); the
    library and each kernel's untuned configuration are measured even beyond it. ``budget_s``: seconds for the whole run
    (None: no limit), of which whole chains and races of finalists have shares (:mod:`dmuon_tune.search.shares`).
    ``patience``: a problem's search ends where so many configurations in a row of each kernel that is not far behind
    were no faster than its best by more than a tie (None: never): the next one improves with a chance of about 1 in
    ``patience``, mostly by less than a fifth, so by about as much as noise in the mean. ``finalists``: how many
    configurations of a problem race at most, beside the untuned ones and the library. ``workers``: measuring processes
    of each device (None: by its kind). Raises UsageError for values that make no sense.
    """

    device: str = "auto"
    dtype: str | None = None
    backends: tuple[str, ...] | None = None
    trials: int = 80
    budget_s: float | None = None
    sampler: str = DEFAULT
    patience: int | None = 15
    finalists: int = 8
    seed: int = 0
    compile_timeout_s: float = 120.0
    run_timeout_s: float = 60.0
    workers: int | None = None
    devices: tuple[str, ...] = ()
    weights_dtype: str = WEIGHTS_DTYPE

    def __post_init__(self) -> None:
        if self.devices and self.device != "auto":
            raise UsageError("device and devices both say what to tune on; give one of them")
        for dtype in (self.dtype, self.weights_dtype):
            if dtype is not None and dtype not in DTYPES:
                raise UsageError(f"unsupported dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
        sampler_type(self.sampler)
        for name in ("trials", "budget_s", "patience", "finalists", "compile_timeout_s", "run_timeout_s", "workers"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name} must be greater than 0, not {value!r}")

    def device_names(self) -> tuple[str, ...]:
        """The devices that are here, by their own names; UsageError where one is not, or they are not all alike."""
        return resolve_alike(self.devices or (self.device,))

    @classmethod
    def of_effort(cls, effort: str, trials: int | None = None, budget_s: float | None = None, **more: Any) -> Self:
        """An effort's options. ``trials`` replace the effort's trials, and where no ``budget_s`` replaces its budget
        that falls away: what was asked for is then measured, whatever it takes."""
        if effort not in EFFORTS:
            raise UsageError(f"unknown effort {effort!r}; choose one of {', '.join(EFFORTS)}")
        chosen = asdict(EFFORTS[effort])
        if trials is not None:
            chosen |= {"trials": trials, "budget_s": None, "patience": None}
        if budget_s is not None:
            chosen["budget_s"] = budget_s
        return cls(**chosen, **more)


@dataclass(frozen=True)
class ProblemReport:
    """One problem's state after the run, over the current kernels' code, device and toolchains.

    ``winner`` and ``library`` are None where nothing was measured ok. ``measured`` counts this run's configurations,
    ``reused`` those found in the cache, ``statuses`` both by how they ended. ``is_end``: a chain's end, which training
    does without where nothing works.
    """

    problem: Problem
    winner: CacheEntry | None
    library: CacheEntry | None
    measured: int
    reused: int
    statuses: dict[str, int]
    is_end: bool = False


@dataclass(frozen=True)
class ChainReport:
    """Whole chains: timed by this run (``failed`` of them not ok), found in the cache, and the groups whose chains the
    budget's end left ``unfinished``."""

    timed: int = 0
    reused: int = 0
    failed: int = 0
    unfinished: int = 0


@dataclass(frozen=True)
class TuneReport:
    """``problems``: most expensive first. ``unavailable``: backend → why it cannot run here. ``complete``: False where
    the budget ended the run before its trials were done. ``contended``: how many of this run's timings other processes
    disturbed, chains' included. ``raced``: how many races of finalists decided."""

    device: DeviceFingerprint
    problems: list[ProblemReport]
    recipes: list[Recipe]
    measured: int
    reused: int
    unavailable: dict[str, str]
    complete: bool
    contended: int = 0
    chains: ChainReport = ChainReport()
    raced: int = 0
