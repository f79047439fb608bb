"""One run's measuring: keeps the workers busy, keeps each result at once, part after part of the budget."""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from logging import getLogger
from pathlib import Path
from typing import Any

import torch

from dmuon_tune import __version__
from dmuon_tune.cache import Store
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.measure.chain import chain_key
from dmuon_tune.measure.executor import Executor
from dmuon_tune.measure.job import AnyJob, ChainJob, Job, Outcome
from dmuon_tune.measurement import Measurement
from dmuon_tune.recipe import Recipe
from dmuon_tune.space import config_to_dict

from .claims import LOOK_EVERY_S, Membership, Share, digest
from .options import TuneOptions
from .progress import Progress
from .races import PREPARE_S, Finals, Race, Retiming, finalists, retimings
from .races import job_of as race_job
from .recipes import ChainSearch
from .schedule import Candidate, ProblemSearch, Schedule
from .shares import chains_share_s, races_share_s

logger = getLogger(__name__)
VALIDATION = "float64 reference on random inputs, poisoned and guarded outputs, two runs bit-equal"
CHAIN_VALIDATION = "polar error against float64 near the plain form's, outputs full of NaN before, two runs bit-equal"
RETIMINGS_MOST_S = 5.0  # of a run, for timings that other processes disturbed
PRODUCTS_GRACE = 0.25  # of the chains' share, which products under way may still take
BUDGET_GRACE_S = 10.0  # what is under way when the budget ends may still finish


Subject = Candidate | Retiming | Race | ChainSearch  # what a job was made for


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
            self._end = time.monotonic() + options.budget_s - share_s - races_share_s(options.budget_s)
            self._grace_s = min(BUDGET_GRACE_S, PRODUCTS_GRACE * share_s)
        self._under_way: dict[int, Subject] = {}  # by their job's seed
        self._finals: Finals | None = None
        self._retimings_s = RETIMINGS_MOST_S  # what is left of them
        self._began = _now("milliseconds")
        self._membership = Membership(store, device)
        self._executor = Executor(device_name, options.workers, options.compile_timeout_s, options.run_timeout_s)
        self.measured, self.raced, self.contended = 0, 0, 0
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
        """What is left of the budget's part that is under way."""
        return math.inf if self._end is None else max(0.0, self._end - time.monotonic())

    @property
    def _limit_s(self) -> float | None:
        return None if self._end is None else self.left_s

    def _extend(self, share_s: Callable[[float], float]) -> None:
        """The next part's share of the budget begins."""
        if self._end is not None and self._options.budget_s is not None:
            self._end += share_s(self._options.budget_s)

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

    def race(self, searches: list[ProblemSearch]) -> None:
        """Race each problem's finalists, one problem by one run, and take disturbed timings again."""
        self._extend(races_share_s)
        most = self._options.finalists
        wanted = [
            search for search in sorted(searches, key=lambda search: -search.time_us)
            if finalists(search, self.provenance, most) or retimings(search, ())
        ]
        if not wanted or self._is_over():
            return
        self._progress.races_started(len(wanted), self._limit_s)
        limits = self.device.limits()
        share = Share(self._membership, {each: [digest("race", each.problem.to_dict(), limits)] for each in wanted})
        while share.open and not self._is_over():
            mine = share.take()
            for search in mine or share.open:
                search.refresh(self._store)  # other runs may have raced them
            if mine:
                self._race(Finals(mine, self._store, self.provenance, most))
                share.finish(mine)
            else:
                self._wait_for_others(share)
        for search in wanted:
            search.refresh(self._store)

    def _race(self, finals: Finals) -> None:
        self._finals, begin = finals, time.monotonic()
        prepare_s = self.left_s / math.ceil(max(1, finals.races) / self._executor.capacity)
        while True:
            while self._executor.has_room and not self._is_over():
                retiming = finals.next_retiming() if time.monotonic() < begin + self._retimings_s else None
                race = None if retiming else finals.next_race()
                if retiming:
                    self._submit(retiming, self._job(retiming.candidate))
                elif race:
                    seed = self._rng.getrandbits(48)
                    self._submit(race, race_job(race, self._device_name, seed, min(PREPARE_S, prepare_s)))
                else:
                    break
            if not self._under_way:
                break
            ended = self._next_outcome()
            if ended is not None:
                self._settle(*ended)
            elif self._is_over(self._grace_s):
                break
        self._retimings_s -= time.monotonic() - begin

    def time_chains(self, searches: list[ChainSearch]) -> int:
        """Time the groups' chains, all recipes before any price of smaller batches; returns how many groups the
        budget's end left unfinished."""
        self._extend(chains_share_s)
        self._grace_s = BUDGET_GRACE_S
        for search in searches:
            self._reuse_chains(search)
        units = {search: [_unit(search.candidate, self.device)] for search in searches if search.candidate is not None}
        if units:
            self._progress.chains_started(len(searches), self._limit_s)
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
            ended = self._next_outcome()
            if ended is not None:
                self._settle(*ended)
                if isinstance(ended[0], ChainSearch):
                    waiting.append(ended[0])
            elif self._is_over(self._grace_s):
                return

    def _reuse_chains(self, search: ChainSearch) -> None:
        """Take what the cache holds of the next chains, however they ended, but for what an earlier run's neighbours
        disturbed."""
        while search.candidate is not None:
            trial = self._store.chain_trial(chain_key(search.candidate, self.device))
            if trial is None or trial.measurement.disturbed and trial.created_at < self._began:
                return
            search.observe(trial.measurement)
            self.chains_reused += 1

    def _keep_chain(self, search: ChainSearch, measurement: Measurement) -> None:
        recipe = search.candidate
        assert recipe is not None
        provenance, key = self._provenance_of(measurement), chain_key(recipe, self.device)
        if measurement.ok:
            provenance["validation"] = CHAIN_VALIDATION
        self._store.record_chain(key, measurement, provenance)
        kept = self._store.chain_trial(key)  # may be an earlier, better result
        search.observe(kept.measurement if kept else measurement)
        self.chains_timed += 1
        self.chains_failed += not measurement.ok
        self.contended += measurement.disturbed
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
                key = candidate.kernel.key
                self._progress.trying(key.problem, key.kernel, config_to_dict(candidate.config))
                self._submit(candidate, self._job(candidate))
            if not self._under_way:
                return schedule.next() is None
            ended = self._next_outcome()
            if ended is not None:
                self._settle(*ended)
            elif self._is_over(self._grace_s):
                return False

    def _submit(self, subject: Subject, job: AnyJob) -> None:
        self._under_way[job.seed] = subject
        self._executor.submit(job)

    def _next_outcome(self) -> tuple[Subject, Outcome] | None:
        """What ended next, and how; None where nothing did before the end of the time."""
        ended = self._executor.wait(self._patience_s())
        return None if ended is None else (self._under_way.pop(ended[0].seed), ended[1])

    def _settle(self, subject: Subject, outcome: Outcome) -> None:
        """Keep an outcome, also one of an earlier part of the run that was under way when that ended."""
        if isinstance(subject, Race):
            self._keep_race(subject, outcome)
            return
        assert isinstance(outcome, Measurement)
        if isinstance(subject, ChainSearch):
            self._keep_chain(subject, outcome)
        elif isinstance(subject, Retiming):
            self._keep_retiming(subject.candidate, outcome)
        else:
            self._keep(subject, outcome)

    def _is_over(self, grace_s: float = 0.0) -> bool:
        return self._end is not None and time.monotonic() >= self._end + grace_s

    def _patience_s(self) -> float | None:
        """How long to wait for an outcome: not past the budget's end, nor for long where other runs may want work."""
        often_s = None if self._membership.is_alone else LOOK_EVERY_S
        left_s = None if self._end is None else max(0.0, self._end + self._grace_s - time.monotonic())
        return min((each for each in (often_s, left_s) if each is not None), default=None)

    def _job(self, candidate: Candidate) -> Job:
        key, config = candidate.kernel.key, config_to_dict(candidate.config)
        return Job(key.kernel, key.problem, config, self._device_name, self._rng.getrandbits(48))

    def _keep(self, candidate: Candidate, measurement: Measurement) -> None:
        key, config = candidate.kernel.key, config_to_dict(candidate.config)
        self._store.record(key, config, measurement, self._provenance_of(measurement))
        search = candidate.search
        planned = search.planned
        search.observe(candidate, measurement)
        self.measured += 1
        self.contended += measurement.disturbed
        self.measured_of[search] = self.measured_of.get(search, 0) + 1
        if search.planned != planned - 1:
            self._progress.settled(planned - 1 - search.planned)
        self._progress.measured(key.problem, key.kernel, config, measurement, search.best_us)

    def _keep_retiming(self, candidate: Candidate, measurement: Measurement) -> None:
        key, config = candidate.kernel.key, config_to_dict(candidate.config)
        self._store.record(key, config, measurement, self._provenance_of(measurement))
        candidate.search.refresh(self._store)

    def _keep_race(self, race: Race, outcome: Outcome) -> None:
        assert self._finals is not None
        self.raced += self._finals.keep(race, outcome, self._provenance_of(outcome))
        winner = race.search.winner(self.provenance)
        if winner is not None:
            self._progress.raced(race.search.problem, winner.key.kernel, winner.measurement)

    def _provenance_of(self, outcome: Outcome) -> dict[str, Any]:
        provenance = {**self.provenance, "date": _now()}
        if isinstance(outcome, Measurement) and not outcome.ok:
            del provenance["validation"]
        return provenance


def _unit(recipe: Recipe, device: DeviceFingerprint) -> str:
    """What names the chains of a recipe's group, whatever their kernels are."""
    key = chain_key(recipe, device)
    return digest(key.identity()["group"], recipe.dtype, key.code_digest, device.limits())


def driver_version() -> str:
    """The NVIDIA kernel driver's version, empty where Linux does not show it."""
    try:
        found = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return ""
    return found.group(1) if found else ""


def _now(timespec: str = "seconds") -> str:
    return datetime.now(UTC).isoformat(timespec=timespec)
