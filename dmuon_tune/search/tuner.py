"""Tunes a model's products: measures candidates, keeps each result at once, and picks winners and recipes."""

from __future__ import annotations

import math
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
from dmuon_tune.backends.imports import import_failures
from dmuon_tune.backends.probe import fingerprint, resolve
from dmuon_tune.cache import Store
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.errors import UsageError
from dmuon_tune.measure.chain import chain_key
from dmuon_tune.measure.executor import Executor
from dmuon_tune.measure.job import AnyJob, ChainJob, Job
from dmuon_tune.measurement import Measurement
from dmuon_tune.recipe import Group, Recipe, default_dtype
from dmuon_tune.space import config_to_dict
from dmuon_tune.spec import KernelSpec

from .claims import LOOK_EVERY_S, Membership, Share, digest
from .ends import EndSearch
from .neighbours import Neighbours
from .options import ChainReport, ProblemReport, TuneOptions, TuneReport
from .progress import Progress, Silent
from .recipes import ChainSearch, Tuned, close, estimates, is_current
from .schedule import (
    Candidate,
    ProblemSearch,
    Schedule,
    kernel_searches,
    problem_search,
    unmeasured_backends,
    usable_kernels,
)
from .workload import ends, served_forms, workload

logger = getLogger(__name__)
VALIDATION = "float64 reference on random inputs, poisoned and guarded outputs, two runs bit-equal"
CHAIN_VALIDATION = "polar error against float64 near the plain form's, outputs full of NaN before, two runs bit-equal"
CHAINS_SHARE = 0.15  # of the budget, for whole chains after their products
CHAINS_LEAST_S = 20.0  # what a group's first chains take where their kernels compile anew ...
CHAINS_MOST_SHARE = 0.4  # ... but never more than this of a short budget
PRODUCTS_GRACE = 0.25  # of the chains' share, which products under way may still take
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
    with run:
        searches = _searches(groups, dtype, specs, device, store, options)
        run.warm(searches)
        broken = import_failures(unmeasured_backends(searches), run.left_s)
        if broken:
            unavailable |= broken
            specs = [spec for spec in specs if spec.backend not in broken]
            searches = _searches(groups, dtype, specs, device, store, options)
        complete = run.measure(searches)
        chain_searches = _chain_searches(groups, dtype, searches, specs, run)
        unfinished = run.time_chains(chain_searches)
    reports = [_report(search, run) for search in searches]
    recipes = [_keep_recipe(search, specs, device, store) for search in chain_searches]
    return TuneReport(
        device,
        reports,
        recipes,
        run.measured,
        sum(report.reused for report in reports),
        unavailable,
        complete,
        run.contended,
        ChainReport(run.chains_timed, run.chains_reused, run.chains_failed, unfinished),
    )


def _searches(
    groups: Sequence[Group], dtype: str, specs: Sequence[KernelSpec], device: DeviceFingerprint, store: Store,
    options: TuneOptions,
) -> list[ProblemSearch]:
    """The searches of the chains' products, then of their ends."""
    how = options.seed, options.sampler, Neighbours(store, device)
    products = {
        problem: problem_search(problem, specs, device, store, options.trials, *how)
        for problem in workload(groups, dtype, specs, device)
    }
    at_ends = [
        EndSearch(
            end, kernel_searches(end, specs, device, store, *how), options.trials,
            products[like] if like else None,
        )
        for end, like in ends(groups, dtype, specs, device).items()
    ]
    return [*products.values(), *at_ends]


class Run:
    """One run's measuring: feeds the workers, first with products, then with chains, until either is exhausted or its
    part of the budget ends. A context manager that ends the workers and the progress."""

    def __init__(
        self, store: Store, options: TuneOptions, device_name: str, device: DeviceFingerprint, progress: Progress
    ) -> None:
        self._store, self._options, self._progress = store, options, progress
        self._device_name, self.device = device_name, device
        self._rng = random.Random(options.seed)
        self._end: float | None = None  # of the products' part, then of the whole budget
        self._grace_s = BUDGET_GRACE_S
        if options.budget_s is not None:
            share_s = chains_share_s(options.budget_s)
            self._end = time.monotonic() + options.budget_s - share_s
            self._grace_s = min(BUDGET_GRACE_S, PRODUCTS_GRACE * share_s)
        self._under_way: dict[int, Candidate | ChainSearch] = {}  # by their job's seed
        self._membership = Membership(store, device)
        self._executor = Executor(device_name, options.workers, options.compile_timeout_s, options.run_timeout_s)
        self.measured, self.contended = 0, 0
        self.chains_timed, self.chains_reused, self.chains_failed = 0, 0, 0
        self.measured_of: dict[ProblemSearch, int] = {}
        self.provenance = {
            "tool": f"dmuon-tune {__version__}",
            "torch": torch.__version__,
            "driver": driver_version() if device.kind == "cuda" else "",
            "device": device.name,
            "seed": options.seed,
            "validation": VALIDATION,
        }

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._executor.close()
        finally:
            self._membership.close()
        self._progress.finished()
        if self.contended:
            logger.warning(
                "%d of %d timings were disturbed by other processes and may be slow; tune on a quiet machine",
                self.contended, self.measured + self.chains_timed,
            )

    @property
    def left_s(self) -> float:
        """What is left of the products' part of the budget."""
        return math.inf if self._end is None else max(0.0, self._end - time.monotonic())

    def warm(self, searches: list[ProblemSearch]) -> None:
        """Let the measuring processes start."""
        self._executor.warm(sum(search.planned for search in searches))

    def measure(self, searches: list[ProblemSearch]) -> bool:
        """Whether everything planned was measured, by this run or others that share the cache, before the end of the
        products' part of the budget."""
        planned = {search: search.planned for search in searches if search.planned}
        if not planned:
            return True
        self._progress.started(sum(planned.values()), self._options.budget_s)
        share = Share(self._membership, {search: [each.key.sha256 for each in search.kernels] for search in planned})
        is_done = True
        while is_done and share.open and not self._is_over():
            mine = share.take()
            self._refresh(mine)
            if mine:
                is_done = self._feed(Schedule(mine), share)
                share.finish([search for search in mine if search not in share.open])
            else:
                self._wait_for_others(share)
        self._refresh(share.open)
        return is_done and not share.open

    def _refresh(self, searches: Sequence[ProblemSearch]) -> None:
        """Take the results that other runs have kept since these searches were made, or last held."""
        new = sum(search.refresh(self._store) for search in searches)
        if new:
            self._progress.reused(new)

    def _wait_for_others(self, share: Share[Any]) -> None:
        holders = share.holders()
        if holders:
            self._progress.waiting(len(share.open), holders)
        time.sleep(LOOK_EVERY_S / 2)

    def time_chains(self, searches: list[ChainSearch]) -> int:
        """Time the groups' chains, all recipes before any price of smaller batches; returns how many groups the
        budget's end left unfinished."""
        if self._options.budget_s is not None and self._end is not None:
            self._end += chains_share_s(self._options.budget_s)
            self._grace_s = BUDGET_GRACE_S
        for search in searches:
            self._reuse_chains(search)
        units = {search: [_unit(search.candidate, self.device)] for search in searches if search.candidate is not None}
        if units:
            left_s = None if self._end is None else max(0.0, self._end - time.monotonic())
            self._progress.chains_started(len(searches), left_s)
        share = Share(self._membership, units)
        while True:
            mine = share.take() if share.open and not self._is_over() else []
            self._time(mine, share)
            share.finish([search for search in mine if search not in share.open])
            if not share.open or self._is_over():
                break
            if not mine:
                self._wait_for_others(share)
        for search in share.open:
            self._reuse_chains(search)
        return sum(search.candidate is not None for search in searches)

    def _time(self, mine: Sequence[ChainSearch], share: Share[ChainSearch]) -> None:
        """Time these groups' chains until they are all timed, given to others or the budget is over."""
        waiting = list(mine)
        while True:
            waiting.sort(key=lambda search: search.is_pricing)
            busy = [each for each in self._under_way.values() if isinstance(each, ChainSearch)]
            for search in share.surplus([*waiting, *busy], busy):
                waiting.remove(search)
                share.give_back([search])
            while waiting and self._executor.has_room and not self._is_over():
                search = waiting.pop(0)
                self._reuse_chains(search)  # another process may have timed it meanwhile
                if search.candidate is not None:
                    self._submit(search, ChainJob(search.candidate, self._device_name, self._rng.getrandbits(48)))
            if not self._under_way:
                return
            outcome = self._next_outcome()
            if outcome is not None and isinstance(outcome[0], ChainSearch):
                self._keep_chain(*outcome)
                waiting.append(outcome[0])
            elif outcome is not None:
                self._keep(*outcome)  # a product that was under way when the products' part ended
            elif self._is_over(self._grace_s):
                return

    def _reuse_chains(self, search: ChainSearch) -> None:
        """Take what the cache holds of the next chains, however they ended."""
        while search.candidate is not None:
            trial = self._store.chain_trial(chain_key(search.candidate, self.device))
            if trial is None:
                return
            search.observe(trial.measurement)
            self.chains_reused += 1

    def _keep_chain(self, search: ChainSearch, measurement: Measurement) -> None:
        recipe = search.candidate
        assert recipe is not None
        provenance = {**self.provenance, "date": _now()}
        if measurement.ok:
            provenance["validation"] = CHAIN_VALIDATION
        else:
            del provenance["validation"]
        self._store.record_chain(chain_key(recipe, self.device), measurement, provenance)
        search.observe(measurement)
        self.chains_timed += 1
        self.chains_failed += not measurement.ok
        self.contended += bool(measurement.resources.get("contended"))
        self._progress.timed(recipe, measurement, search.best_us)
        self._reuse_chains(search)

    def _feed(self, schedule: Schedule, share: Share[ProblemSearch]) -> bool:
        """Measure what the schedule has, less what is given to others; whether all that was done before the end."""
        while True:
            busy = [each.search for each in self._under_way.values() if isinstance(each, Candidate)]
            for search in share.surplus(list(dict.fromkeys([*schedule.left, *busy])), busy):
                schedule.drop(search)
                share.give_back([search])
            while self._executor.has_room and not self._is_over():
                candidate = schedule.next()
                if candidate is None:
                    break
                self._submit(candidate, self._job(candidate))
            if not self._under_way:
                return schedule.next() is None
            outcome = self._next_outcome()
            if outcome is not None and isinstance(outcome[0], Candidate):
                self._keep(*outcome)
            elif self._is_over(self._grace_s):
                return False

    def _submit(self, subject: Candidate | ChainSearch, job: AnyJob) -> None:
        self._under_way[job.seed] = subject
        self._executor.submit(job)

    def _next_outcome(self) -> tuple[Candidate, Measurement] | tuple[ChainSearch, Measurement] | None:
        """What ended next, and how; None where nothing did before the end of the time."""
        outcome = self._executor.wait(self._patience_s())
        if outcome is None:
            return None
        job, measurement = outcome
        subject = self._under_way.pop(job.seed)
        return (subject, measurement) if isinstance(subject, Candidate) else (subject, measurement)

    def _is_over(self, grace_s: float = 0.0) -> bool:
        return self._end is not None and time.monotonic() >= self._end + grace_s

    def _patience_s(self) -> float | None:
        """How long to wait for an outcome: not past the budget's end, nor for long where other runs may want work."""
        often_s = None if self._membership.is_alone else LOOK_EVERY_S
        left_s = None if self._end is None else max(0.0, self._end + self._grace_s - time.monotonic())
        return min((each for each in (often_s, left_s) if each is not None), default=None)

    def _job(self, candidate: Candidate) -> Job:
        config = config_to_dict(candidate.config)
        key = candidate.kernel.key
        self._progress.trying(key.problem, key.kernel, config)
        return Job(key.kernel, key.problem, config, self._device_name, self._rng.getrandbits(48))

    def _keep(self, candidate: Candidate, measurement: Measurement) -> None:
        key, config = candidate.kernel.key, config_to_dict(candidate.config)
        provenance = {**self.provenance, "date": _now()}
        if not measurement.ok:
            del provenance["validation"]
        self._store.record(key, config, measurement, provenance)
        search = candidate.search
        search.observe(candidate, measurement)
        self.measured += 1
        self.contended += bool(measurement.resources.get("contended"))
        self.measured_of[search] = self.measured_of.get(search, 0) + 1
        self._progress.measured(key.problem, key.kernel, config, measurement, search.best_us)


def _unit(recipe: Recipe, device: DeviceFingerprint) -> str:
    """What names the chains of a recipe's group, whatever their kernels are."""
    key = chain_key(recipe, device)
    return digest(key.identity()["group"], recipe.dtype, key.code_digest, device.limits())


def chains_share_s(budget_s: float) -> float:
    """The seconds of a budget that are kept for whole chains."""
    return max(CHAINS_SHARE * budget_s, min(CHAINS_LEAST_S, CHAINS_MOST_SHARE * budget_s))


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


def _chain_searches(
    groups: Sequence[Group], dtype: str, searches: Sequence[ProblemSearch], specs: Sequence[KernelSpec], run: Run
) -> list[ChainSearch]:
    """A search for each group that has a form whose every product has a winner, in order."""
    tuned = {}
    for search in searches:
        best = search.winner(run.provenance)
        if best is not None:
            # Of ends the winners alone: they change nothing else in a chain.
            rivals = () if search.is_end else search.rivals(run.provenance, close(search.problem, run.device))
            tuned[search.problem] = Tuned(best, rivals)
    found = []
    for group in dict.fromkeys(groups):
        estimated = estimates(group, served_forms(group, dtype, specs, run.device), dtype, tuned)
        if estimated:
            found.append(ChainSearch(estimated, tuned, specs, run.device))
    return found


def _keep_recipe(search: ChainSearch, specs: Sequence[KernelSpec], device: DeviceFingerprint, store: Store) -> Recipe:
    """Keep the recipe found in place of the one there was, unless that is of today's kernels and was timed, and this is
    an estimate or, of a search cut short, slower."""
    recipe = search.recipe()
    kept = store.recipe(device, recipe.group, recipe.dtype)
    if kept is not None and is_current(kept, specs, device):
        cut_short = search.candidate is not None and not search.is_pricing
        if not recipe.timed or cut_short and (kept.cost_us or 0.0) < (recipe.cost_us or 0.0):
            return kept
    if kept != recipe:
        store.put_recipe(device, recipe)
    return recipe


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
