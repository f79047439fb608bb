"""Tunes a model's products: measures candidates, keeps each result at once, and picks winners and recipes."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from logging import getLogger
from pathlib import Path
from typing import Any

import torch

from dmuon_tune import __version__
from dmuon_tune.backends import backends
from dmuon_tune.backends.probe import fingerprint, resolve
from dmuon_tune.cache import Store
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.errors import UsageError
from dmuon_tune.measure.executor import Executor, Job
from dmuon_tune.measurement import Measurement
from dmuon_tune.recipe import Group, Recipe, default_dtype
from dmuon_tune.space import config_to_dict
from dmuon_tune.spec import KernelSpec

from .options import ProblemReport, TuneOptions, TuneReport
from .progress import Progress, Silent
from .recipes import cheapest_recipes
from .schedule import Candidate, ProblemSearch, Schedule, import_failures, problem_search, usable_kernels
from .workload import workload

logger = getLogger(__name__)
VALIDATION = "float64 reference on random inputs, poisoned and guarded outputs, two runs bit-equal"
BUDGET_GRACE_S = 10.0  # what is under way when the budget ends may still finish


def tune(
    groups: Sequence[Group], store: Store, options: TuneOptions, progress: Progress | None = None
) -> TuneReport:
    """Measure every product of these groups and keep the results, winners' recipes included, in ``store``.

    A configuration that the store holds under the current key, however it ended, is not measured again. Raises
    UsageError for a device or backend that is not here, NoLegalConfigError where nothing can run a product, CacheError
    where a result cannot be kept; KeyboardInterrupt passes through once the measuring processes are stopped.
    """
    device_name = resolve(options.device)
    device = fingerprint(device_name)
    dtype = options.dtype or default_dtype(device.kind)
    unknown = set(options.backends or ()) - set(backends())
    if unknown:
        raise UsageError(f"unknown backend {sorted(unknown)[0]!r}; choose from {', '.join(sorted(backends()))}")
    run = Run(store, options, device_name, device, progress or Silent())
    specs, unavailable = usable_kernels(device, options.backends)

    def plan(usable: Sequence[KernelSpec]) -> list[ProblemSearch]:
        return [
            problem_search(problem, usable, device, store, options.trials, options.seed)
            for problem in workload(groups, dtype, usable, device)
        ]

    searches = plan(specs)
    broken = import_failures(searches)
    if broken:
        unavailable |= broken
        searches = plan([spec for spec in specs if spec.backend not in broken])
    complete = run.measure(searches)
    reports = [_report(search, run) for search in searches]
    recipes = _keep_recipes(groups, dtype, reports, device, store)
    return TuneReport(
        device,
        reports,
        recipes,
        run.measured,
        sum(report.reused for report in reports),
        unavailable,
        complete,
        run.contended,
    )


class Run:
    """One run's measuring: feeds the workers from a schedule until it is exhausted or the budget ends."""

    def __init__(
        self, store: Store, options: TuneOptions, device_name: str, device: DeviceFingerprint, progress: Progress
    ) -> None:
        self._store, self._options, self._progress = store, options, progress
        self._device_name = device_name
        self._rng = random.Random(options.seed)
        self._end = None if options.budget_s is None else time.monotonic() + options.budget_s
        self.measured, self.reused, self.contended = 0, 0, 0
        self.measured_of: dict[ProblemSearch, int] = {}
        self.provenance = {
            "tool": f"dmuon-tune {__version__}",
            "torch": torch.__version__,
            "driver": driver_version() if device.kind == "cuda" else "",
            "device": device.name,
            "seed": options.seed,
            "validation": VALIDATION,
        }

    def measure(self, searches: list[ProblemSearch]) -> bool:
        """Whether everything planned was measured, before the budget's end."""
        planned = sum(search.planned for search in searches)
        if not planned:
            return True
        options = self._options
        self._progress.started(planned, options.budget_s)
        try:
            with Executor(
                self._device_name, options.workers, options.compile_timeout_s, options.run_timeout_s
            ) as executor:
                self._feed(executor, Schedule(searches))
        finally:
            self._progress.finished()
        if self.contended:
            logger.warning(
                "%d of %d timings were disturbed by other processes and may be slow; tune on a quiet machine",
                self.contended, self.measured,
            )
        return self.measured + self.reused == planned

    def _feed(self, executor: Executor, schedule: Schedule) -> None:
        under_way: dict[int, Candidate] = {}
        while True:
            while executor.has_room and not self._is_over():
                candidate = schedule.next()
                if candidate is None:
                    break
                if self._reuse(candidate):
                    continue
                job = self._job(candidate)
                under_way[job.seed] = candidate
                executor.submit(job)
            if not executor.in_flight:
                return
            outcome = executor.wait(self._patience_s())
            if outcome is not None:
                job, measurement = outcome
                candidate = under_way.pop(job.seed)
                if candidate.kernel.stored(self._store, candidate.config) is not None:
                    schedule.shuffle()  # another process goes the same way: both would measure everything
                self._keep(candidate, measurement)
            elif self._is_over(BUDGET_GRACE_S):
                return

    def _is_over(self, grace_s: float = 0.0) -> bool:
        return self._end is not None and time.monotonic() >= self._end + grace_s

    def _patience_s(self) -> float | None:
        return None if self._end is None else max(0.0, self._end + BUDGET_GRACE_S - time.monotonic())

    def _job(self, candidate: Candidate) -> Job:
        config = config_to_dict(candidate.config)
        key = candidate.kernel.key
        self._progress.trying(key.problem, key.kernel, config)
        return Job(key.kernel, key.problem, config, self._device_name, self._rng.getrandbits(48))

    def _reuse(self, candidate: Candidate) -> bool:
        """Take the result of another process that has measured this configuration since the run began."""
        trial = candidate.kernel.stored(self._store, candidate.config)
        if trial is None:
            return False
        candidate.search.reuse(candidate, trial)
        self.reused += 1
        return True

    def _keep(self, candidate: Candidate, measurement: Measurement) -> None:
        key, config = candidate.kernel.key, config_to_dict(candidate.config)
        provenance = {**self.provenance, "date": datetime.now(UTC).isoformat(timespec="seconds")}
        if not measurement.ok:
            del provenance["validation"]
        self._store.record(key, config, measurement, provenance)
        search = candidate.search
        search.observe(candidate, measurement)
        self.measured += 1
        self.contended += bool(measurement.resources.get("contended"))
        self.measured_of[search] = self.measured_of.get(search, 0) + 1
        self._progress.measured(key.problem, key.kernel, config, measurement, search.best_us)


def driver_version() -> str:
    """The NVIDIA kernel driver's version, empty where Linux does not show it."""
    try:
        found = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return ""
    return found.group(1) if found else ""


def _report(search: ProblemSearch, run: Run) -> ProblemReport:
    return ProblemReport(
        search.problem,
        search.winner(run.provenance),
        search.library(run.provenance),
        run.measured_of.get(search, 0),
        search.reused,
        search.statuses(),
    )


def _keep_recipes(
    groups: Sequence[Group], dtype: str, reports: list[ProblemReport], device: DeviceFingerprint, store: Store
) -> list[Recipe]:
    winner_us: dict[Any, float] = {}
    for report in reports:
        if report.winner is not None and report.winner.measurement.median_us is not None:
            winner_us[report.problem] = report.winner.measurement.median_us
    recipes = cheapest_recipes(groups, dtype, winner_us)
    for recipe in recipes:
        if store.recipe(device, recipe.group, recipe.dtype) != recipe:
            store.put_recipe(device, recipe)
    return recipes
