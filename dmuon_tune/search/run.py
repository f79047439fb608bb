"""One run's measuring: keeps the workers busy, keeps each result at once, part after part of the budget."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from logging import getLogger
from typing import Any

from dmuon_tune.backends.imports import POLL_S, ImportCheck
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import Store
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.measure.chain import chain_key
from dmuon_tune.measure.executor import Executor, default_workers
from dmuon_tune.measure.fleet import Fleet
from dmuon_tune.measure.job import AnyJob, ChainJob, Job, Outcome
from dmuon_tune.measurement import Measurement
from dmuon_tune.recipe import Recipe
from dmuon_tune.space import config_to_dict

from .claims import LOOK_EVERY_S, Membership, Share, digest
from .homes import Homes
from .kernel_search import KernelSearch
from .options import TuneOptions
from .problem_search import Candidate, ProblemSearch, unmeasured_backends
from .progress import Progress
from .provenance import CHAIN_VALIDATION, now, of_run
from .races import PREPARE_S, Finals, Race, Retiming, finalists, retimings
from .races import job_of as race_job
from .recipes import ChainSearch
from .schedule import Schedule
from .shares import chains_share_s, races_share_s

logger = getLogger(__name__)
RETIMINGS_MOST_S = 5.0  # of a run, for timings that other processes disturbed
PRODUCTS_GRACE = 0.25  # of the chains' share, which products under way may still take
BUDGET_GRACE_S = 5.0  # what is under way when the budget ends may still finish


Subject = Candidate | Retiming | Race | ChainSearch  # what a job was made for


class Run:
    """One run's measuring: feeds the workers, first with products, then with chains, until either is exhausted or its
    part of the budget ends. A context manager that ends the workers and the progress."""

    def __init__(self, store: Store, options: TuneOptions, progress: Progress) -> None:
        self._store, self._options, self._progress = store, options, progress
        names = options.device_names()
        self.device = fingerprint(names[0])
        self._rng = random.Random(options.seed)
        self._end: float | None = None  # of the products' part, then of the whole budget
        self._whole_end: float | None = None
        self._grace_s = BUDGET_GRACE_S
        if options.budget_s is not None:
            share_s = chains_share_s(options.budget_s)
            self._whole_end = time.monotonic() + options.budget_s
            self._end = self._whole_end - share_s - races_share_s(options.budget_s)
            self._grace_s = min(BUDGET_GRACE_S, PRODUCTS_GRACE * share_s)
        self._under_way: dict[int, Subject] = {}  # by their job's seed
        self._finals: Finals | None = None
        self._imports = ImportCheck(())
        self._retimings_s = RETIMINGS_MOST_S  # what is left of them
        self._began = now("milliseconds")
        self._membership = Membership(store, self.device)
        workers = options.workers or default_workers(self.device.kind, len(names))
        self._fleet = Fleet([
            Executor(name, workers, options.compile_timeout_s, options.run_timeout_s) for name in names
        ])
        self._homes = Homes(self._fleet)
        self.measured, self.raced, self.contended = 0, 0, 0
        self.chains_timed, self.chains_reused, self.chains_failed = 0, 0, 0
        self.measured_of: dict[ProblemSearch, int] = {}
        self.provenance = of_run(self.device, options.seed)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._fleet.close()
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
    def _whole_left_s(self) -> float | None:
        """What is left of the whole budget."""
        return None if self._whole_end is None else max(0.0, self._whole_end - time.monotonic())

    @property
    def broken(self) -> dict[str, str]:
        """Backend → why its DSL, though installed, does not import: nothing of it was measured."""
        return self._imports.failures

    def _extend(self, share_s: Callable[[float], float]) -> None:
        """The next part's share of the budget begins."""
        if self._end is not None and self._options.budget_s is not None:
            self._end += share_s(self._options.budget_s)

    def warm(self, searches: list[ProblemSearch]) -> None:
        """Let the measuring processes start."""
        self._fleet.warm(sum(search.planned for search in searches))

    def measure(self, searches: list[ProblemSearch]) -> bool:
        """Whether everything planned was measured, by this run or others that share the cache, before the end of the
        products' part of the budget."""
        planned = {search: search.planned for search in searches if search.planned}
        if not planned:
            return True
        self._progress.started(sum(planned.values()), self._options.budget_s, len(planned))
        share = Share(self._membership, {search: [each.key.sha256 for each in search.kernels] for search in planned})
        is_done = True
        with ImportCheck(unmeasured_backends(planned)) as self._imports:
            if self.device.kind == "cuda":  # a CPU's timings they would disturb
                self._imports.begin()
            while is_done and share.open and not self._is_over():
                mine = share.take()
                self._refresh(mine)
                if mine:
                    is_done = self._feed(Schedule(mine, self._is_ready), share, list(planned))
                    share.finish([search for search in mine if search not in share.open])
                else:
                    self._wait_for_others(share)
        self._refresh(share.open)
        return is_done and not share.open

    def _is_ready(self, kernel: KernelSearch) -> bool:
        """Whether a kernel may be measured: its DSL imports, and on a CPU no other is about to find out."""
        name = kernel.spec.backend
        is_quiet = self.device.kind == "cuda" or name == "library" or self._imports.is_over
        return is_quiet and self._imports.imports(name)

    def _leave_out_broken(self, schedule: Schedule, searches: Sequence[ProblemSearch]) -> None:
        for name in self._imports.poll():
            schedule.leave_out(name)
            for search in searches:
                planned = search.planned
                search.leave_out(name)
                self._progress.settled(planned - search.planned)

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
        self._progress.races_started(len(wanted), self._whole_left_s)
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
        self._finals = finals
        begin = retiming_until = time.monotonic()
        prepare_s = self.left_s / math.ceil(max(1, finals.races) / self._fleet.capacity)
        while True:
            while not self._is_over() and (room := self._fleet.with_room()):
                retiming = finals.next_retiming() if time.monotonic() < begin + self._retimings_s else None
                race = None if retiming else finals.next_race()
                if retiming:
                    retiming_until = time.monotonic()
                    self._submit(room[0], retiming, self._job(retiming.candidate, room[0].device))
                elif race:
                    job = race_job(race, room[0].device, self._rng.getrandbits(48), min(PREPARE_S, prepare_s))
                    self._submit(room[0], race, job)
                else:
                    break
            if not self._under_way:
                break
            ended = self._next_outcome()
            if ended is not None:
                self._settle(*ended)
            elif self._is_over(self._grace()):
                break
        self._retimings_s -= retiming_until - begin

    def time_chains(self, searches: list[ChainSearch]) -> int:
        """Time the groups' chains, the earliest stage of all first; returns how many groups the budget's end left
        unfinished."""
        self._extend(chains_share_s)
        self._grace_s = BUDGET_GRACE_S
        for search in searches:
            self._reuse_chains(search)
        units = {search: [_unit(search.candidate, self.device)] for search in searches if search.candidate is not None}
        if units:
            self._progress.chains_started(len(searches), self._whole_left_s)
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
            waiting.sort(key=lambda search: search.urgency)
            busy = [each for each in self._under_way.values() if isinstance(each, ChainSearch)]
            for search in share.surplus([*waiting, *busy], busy):
                waiting.remove(search)
                share.give_back([search])
            while not self._is_over() and (turn := self._homes.next_chain(waiting)):
                executor, search = turn
                waiting.remove(search)
                self._reuse_chains(search)  # another process may have timed it meanwhile
                if search.candidate is not None:
                    job = ChainJob(search.candidate, executor.device, self._rng.getrandbits(48))
                    self._submit(executor, search, job)
            if not self._under_way:
                return
            ended = self._next_outcome()
            if ended is not None:
                self._settle(*ended)
                if isinstance(ended[0], ChainSearch):
                    waiting.append(ended[0])
            elif self._is_over(self._grace()):
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

    def _keep_chain(self, search: ChainSearch, measurement: Measurement, provenance: dict[str, Any]) -> None:
        recipe = search.candidate
        assert recipe is not None
        key = chain_key(recipe, self.device)
        if measurement.ok:
            provenance = {**provenance, "validation": CHAIN_VALIDATION}
        self._store.record_chain(key, measurement, provenance)
        kept = self._store.chain_trial(key)  # may be an earlier, better result
        search.observe(kept.measurement if kept else measurement)
        self.chains_timed += 1
        self.chains_failed += not measurement.ok
        self.contended += measurement.disturbed
        self._progress.timed(recipe, measurement, search.best_us)
        self._reuse_chains(search)

    def _feed(self, schedule: Schedule, share: Share[ProblemSearch], searches: Sequence[ProblemSearch]) -> bool:
        """Measure what the schedule has, less what is given to others; whether all that was done before the end."""
        while True:
            self._leave_out_broken(schedule, searches)
            busy = [each.search for each in self._under_way.values() if isinstance(each, Candidate)]
            for search in share.surplus(list(dict.fromkeys([*schedule.left, *busy])), busy):
                schedule.drop(search)
                share.give_back([search])
            while not self._is_over() and (found := self._homes.next_candidate(schedule, busy)):
                executor, candidate = found
                busy.append(candidate.search)
                key = candidate.kernel.key
                self._progress.trying(key.problem, key.kernel, config_to_dict(candidate.config))
                self._submit(executor, candidate, self._job(candidate, executor.device))
            if not self._under_way:
                if self._is_over() or schedule.is_done():
                    return schedule.is_done()
                self._imports.begin()  # all that is left waits for them
                time.sleep(POLL_S)
                continue
            ended = self._next_outcome()
            if ended is not None:
                self._settle(*ended)
            elif self._is_over(self._grace()):
                return False

    def _submit(self, executor: Executor, subject: Subject, job: AnyJob) -> None:
        self._under_way[job.seed] = subject
        executor.submit(job)

    def _next_outcome(self) -> tuple[Subject, Outcome, dict[str, Any]] | None:
        """What ended next, how, and its provenance; None where nothing did before the end of the time."""
        ended = self._fleet.wait(self._patience_s())
        if ended is None:
            return None
        job, outcome = ended
        provenance = {**self.provenance, "date": now(), "on": job.device}
        if isinstance(outcome, Measurement) and not outcome.ok:
            del provenance["validation"]
        return self._under_way.pop(job.seed), outcome, provenance

    def _settle(self, subject: Subject, outcome: Outcome, provenance: dict[str, Any]) -> None:
        """Keep an outcome, also one of an earlier part of the run that was under way when that ended."""
        if isinstance(subject, Race):
            self._keep_race(subject, outcome, provenance)
            return
        assert isinstance(outcome, Measurement)
        if isinstance(subject, ChainSearch):
            self._keep_chain(subject, outcome, provenance)
        elif isinstance(subject, Retiming):
            self._keep_retiming(subject.candidate, outcome, provenance)
        else:
            self._keep(subject, outcome, provenance)

    def _is_over(self, grace_s: float = 0.0) -> bool:
        return self._end is not None and time.monotonic() >= self._end + grace_s

    def _grace(self) -> float:
        """How long what is under way at the end of the budget's part may still take; of a run's first results as long
        as the whole budget lasts."""
        rest_s = self._whole_end - self._end if self._whole_end is not None and self._end is not None else 0.0
        return self._grace_s if self.measured else max(self._grace_s, rest_s)

    def _patience_s(self) -> float | None:
        """How long to wait for an outcome: not past the budget's end, nor for long where other runs may want work or
        DSLs are being imported."""
        often_s = None if self._membership.is_alone else LOOK_EVERY_S
        import_s = None if self._imports.is_over else POLL_S
        left_s = None if self._end is None else max(0.0, self._end + self._grace() - time.monotonic())
        return min((each for each in (often_s, import_s, left_s) if each is not None), default=None)

    def _job(self, candidate: Candidate, device: str) -> Job:
        key, config = candidate.kernel.key, config_to_dict(candidate.config)
        return Job(key.kernel, key.problem, config, device, self._rng.getrandbits(48))

    def _keep(self, candidate: Candidate, measurement: Measurement, provenance: dict[str, Any]) -> None:
        key, config = candidate.kernel.key, config_to_dict(candidate.config)
        self._store.record(key, config, measurement, provenance)
        search = candidate.search
        planned = search.planned
        search.observe(candidate, measurement)
        self.measured += 1
        self.contended += measurement.disturbed
        self.measured_of[search] = self.measured_of.get(search, 0) + 1
        if search.planned != planned - 1:
            self._progress.settled(planned - 1 - search.planned)
        self._progress.measured(key.problem, key.kernel, config, measurement, search.best_us)

    def _keep_retiming(self, candidate: Candidate, measurement: Measurement, provenance: dict[str, Any]) -> None:
        key, config = candidate.kernel.key, config_to_dict(candidate.config)
        self._store.record(key, config, measurement, provenance)
        candidate.search.refresh(self._store)

    def _keep_race(self, race: Race, outcome: Outcome, provenance: dict[str, Any]) -> None:
        assert self._finals is not None
        decided = self._finals.keep(race, outcome, provenance)
        self.raced += decided
        winner = race.search.winner(self.provenance) if decided else None
        if winner is not None:
            self._progress.raced(race.search.problem, winner.key.kernel, winner.measurement)


def _unit(recipe: Recipe, device: DeviceFingerprint) -> str:
    """What names the chains of a recipe's group, whatever their kernels are."""
    key = chain_key(recipe, device)
    return digest(key.identity()["group"], recipe.dtype, key.code_digest, device.limits())
