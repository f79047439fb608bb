"""Decides what to measure next: rounds over all problems, their kernels' untuned configurations first."""

from __future__ import annotations

import itertools
import json
import math
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dmuon_tune.backends import backends
from dmuon_tune.cache import CacheEntry, Store, Trial, TuningKey
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.errors import NoLegalConfigError
from dmuon_tune.kernel_specs import kernels
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measure.winners import TIE, Contender, library_kernel, winner
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.space import config_json, config_to_dict
from dmuon_tune.spec import KernelSpec

from .neighbours import Neighbours
from .proposer import Proposer
from .samplers import DEFAULT, sampler_type

ENDS_AFTER = 4  # a fifth of the candidates: ends are a small part of a step, and start from what their products found
MOST_RIVALS = 3  # that are tried in the winner's place inside a chain
FAIR_TRIALS = 3  # configurations of a kernel before it may be left behind
FAR_BEHIND = 1.3  # times the best: no space hides its best so far below its untuned choice unless that is bad


@dataclass(frozen=True)
class How:
    """How every space is searched: ``sampler`` by its name, seeded by ``seed``, which may know what ``neighbours`` ran
    best."""

    neighbours: Neighbours
    sampler: str = DEFAULT
    seed: int = 0


class KernelSearch:
    """One kernel's search for one problem, continued from the trials that the cache holds under the current key."""

    def __init__(
        self, spec: KernelSpec, key: TuningKey, legal: list[Any], device: DeviceFingerprint, store: Store, how: How
    ) -> None:
        self.spec, self.key, self.legal_count = spec, key, len(legal)
        self.untuned = spec.untuned(key.problem, device)
        self.proposer = Proposer(
            spec.Config, legal, sampler_type(how.sampler), how.seed ^ zlib.crc32(key.canonical_json().encode()),
            first=lambda: self._likeliest(how.neighbours),
        )
        self.outcomes: list[tuple[Any, Measurement, Trial | None]] = []
        self._legal = legal
        self.refresh(store)

    @cached_property
    def _by_text(self) -> dict[str, Any]:
        return {config_json(config): config for config in self._legal}

    def _likeliest(self, neighbours: Neighbours) -> list[Any]:
        problem, device = self.key.problem, self.key.device
        own = self.spec.seeds(problem, device) if self.spec.seeds else ()
        return [self.untuned, *own, *neighbours.best(self.spec, problem)]

    @property
    def needs_seed(self) -> bool:
        return all(config != self.untuned for config, _, _ in self.outcomes)

    def is_legal(self, config: Any) -> bool:
        return self.proposer.is_legal(config)

    def observe(self, config: Any, measurement: Measurement, trial: Trial | None = None) -> None:
        """``trial``: the cache's record, where the measurement is not this run's."""
        self.proposer.observe(config, measurement)
        self.outcomes.append((config, measurement, trial))

    def refresh(self, store: Store) -> list[Measurement]:
        """Take what the store holds now of each configuration; returns what this search did not know."""
        held = {_trial_json(trial): trial for trial in store.trials(self.key)}
        for place, (config, measurement, trial) in enumerate(self.outcomes):
            found = held.pop(config_json(config), None)
            self.outcomes[place] = config, found.measurement if found else measurement, trial
        new = [(self._by_text[text], trial) for text, trial in held.items() if text in self._by_text]
        for config, trial in new:
            self.observe(config, trial.measurement, trial)
        return [trial.measurement for _, trial in new]

    def contenders(self, provenance: dict[str, Any]) -> Iterator[Contender]:
        """The ok outcomes; ``provenance`` is this run's."""
        for config, measurement, trial in self.outcomes:
            if measurement.ok:
                origin = provenance if trial is None else {"date": trial.created_at}
                entry = CacheEntry(
                    self.key, config_to_dict(config), measurement, provenance.get("validation", ""), origin
                )
                yield Contender(entry, config == self.untuned)


def _trial_json(trial: Trial) -> str:
    return json.dumps(trial.config, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True)
class Candidate:
    """A configuration to measure; ``kernel`` learns its outcome."""

    search: ProblemSearch
    kernel: KernelSearch
    config: Any


class ProblemSearch:
    """One problem's search over all kernels that serve it, the library first."""

    is_end = False
    like: ProblemSearch | None = None  # of an end: the search of the product that it stands for

    def __init__(
        self, problem: Problem, kernel_searches: list[KernelSearch], trials: int, patience: int | None = None,
        launches: int = 1,
    ) -> None:
        self.problem, self.trials = problem, trials
        self.kernels = sorted(kernel_searches, key=lambda each: (each.key.kernel != library_kernel(problem.op)))
        self._patience, self._launches = patience, launches
        self._next_kernel = 0
        self.reused = self.known
        self._proposed = self.reused
        self.best_us = min(self._medians(), default=None)
        self._in_vain = 0  # configurations since the last that was faster than all before beyond noise
        self._mark_us = math.inf
        before = [outcome for each in self.kernels for outcome in each.outcomes]
        for outcome in sorted(before, key=lambda outcome: outcome[2].created_at if outcome[2] else ""):
            self._count(outcome[1])

    def _medians(self) -> Iterator[float]:
        for each in self.kernels:
            for _, measurement, _ in each.outcomes:
                if measurement.median_us is not None:
                    yield measurement.median_us

    def fastest(self) -> list[tuple[str, Any]]:
        """(kernel, configuration) of every ok outcome, the smallest median first."""
        found = [
            (measurement.median_us, each.spec.name, config)
            for each in self.kernels
            for config, measurement, _ in each.outcomes
            if measurement.median_us is not None
        ]
        return [(name, config) for _, name, config in sorted(found, key=lambda outcome: outcome[0])]

    def _count(self, measurement: Measurement) -> None:
        self._in_vain += 1
        if measurement.median_us is not None and measurement.median_us * TIE < self._mark_us:
            self._in_vain, self._mark_us = 0, measurement.median_us

    @property
    def known(self) -> int:
        """How many configurations have an outcome."""
        return sum(len(each.outcomes) for each in self.kernels)

    @property
    def time_us(self) -> float:
        """What the model spends in it at its best so far; without any result it comes before all others."""
        return math.inf if self.best_us is None else self._launches * self.best_us

    @property
    def urgency(self) -> float:
        """The time that a trial may save, in parts of what the model spends here: the more trials, the less."""
        return self.time_us / (self._proposed + 1)

    @property
    def is_settled(self) -> bool:
        """Whether more trials are not worth their time: ``patience`` configurations in a row were no faster beyond
        noise, or an earlier run ended this search in a race after as many trials."""
        if self._patience is not None and self._in_vain >= self._patience and self.best_us is not None:
            return True
        records = (m.resources.get("race", {}) for each in self.kernels for _, m, _ in each.outcomes if m.place == 0)
        return any(record.get("trials", 0) >= self.trials for record in records)

    @property
    def is_begun(self) -> bool:
        """Whether every kernel's untuned configuration has an outcome."""
        return not any(each.needs_seed for each in self.kernels)

    @property
    def planned(self) -> int:
        """How many configurations a run without a budget still measures."""
        seeds = sum(each.needs_seed for each in self.kernels)
        legal = sum(each.legal_count for each in self.kernels)
        return seeds if self.is_settled else max(seeds, min(self.trials, legal) - self.known)

    def seeds(self) -> list[Candidate]:
        """Each kernel's untuned configuration that was not measured yet; they count as proposed."""
        missing = [each for each in self.kernels if each.needs_seed]
        for each in missing:
            each.proposer.reserve(each.untuned)
        self._proposed += len(missing)
        return [Candidate(self, each, each.untuned) for each in missing]

    def propose(self) -> Candidate | None:
        """The next kernel's next configuration; None where the trials or all spaces are used up."""
        if self._proposed >= self.trials or self.is_settled:
            return None
        turns = [self.kernels[(self._next_kernel + turn) % len(self.kernels)] for turn in range(len(self.kernels))]
        for each in sorted(turns, key=self._is_behind):  # stable: in turn, those far behind only where the rest is done
            config = each.proposer.propose()
            if config is not None:
                self._next_kernel = self.kernels.index(each) + 1
                self._proposed += 1
                return Candidate(self, each, config)
        return None

    def leave_out(self, backend: str) -> None:
        """Forget the kernels of a DSL and what is known of them."""
        gone = [each for each in self.kernels if each.spec.backend == backend]
        self.kernels = [each for each in self.kernels if each not in gone]
        self._next_kernel = 0
        self.reused -= sum(len(each.outcomes) for each in gone)
        reserved = sum(each.needs_seed and not each.proposer.reserve(each.untuned) for each in gone)
        self._proposed -= reserved + sum(len(each.outcomes) for each in gone)
        self.best_us = min(self._medians(), default=None)

    def _is_behind(self, kernel: KernelSearch) -> bool:
        """Whether a kernel's first FAIR_TRIALS configurations are all far slower than the problem's best, or failed."""
        best_us = min((m.median_us for _, m, _ in kernel.outcomes if m.median_us is not None), default=math.inf)
        return len(kernel.outcomes) >= FAIR_TRIALS and best_us > FAR_BEHIND * (self.best_us or math.inf)

    def observe(self, candidate: Candidate, measurement: Measurement) -> None:
        candidate.kernel.observe(candidate.config, measurement)
        self._count(measurement)
        self.best_us = min(self._medians(), default=None)

    def refresh(self, store: Store) -> int:
        """Take what the store holds now, while nothing of this search is under way; returns how much of it is new."""
        new = [measurement for each in self.kernels for measurement in each.refresh(store)]
        for measurement in new:
            self._count(measurement)
        self.reused += len(new)
        self._proposed = self.known
        self.best_us = min(self._medians(), default=None)
        return len(new)

    def statuses(self) -> dict[str, int]:
        return dict(Counter(measurement.status for each in self.kernels for _, measurement, _ in each.outcomes))

    def contenders(self, provenance: dict[str, Any]) -> list[Contender]:
        """The ok outcomes of every kernel; ``provenance`` is this run's."""
        return [contender for each in self.kernels for contender in each.contenders(provenance)]

    def winner(self, provenance: dict[str, Any]) -> CacheEntry | None:
        return winner(self.contenders(provenance))

    def rivals(self, provenance: dict[str, Any], close: float) -> tuple[CacheEntry, ...]:
        """The fastest ok entries beside the winner, whose medians are within ``close`` times the fastest."""
        limit_us = close * (self.best_us or 0.0)
        others = [contender.entry for contender in self._losers(provenance) if contender.median_us <= limit_us]
        return tuple(others[:MOST_RIVALS])

    def own_rival(self, provenance: dict[str, Any], close: float) -> CacheEntry | None:
        """Where the library wins: the fastest of this project's kernels, if within ``close`` times the fastest."""
        best, limit_us = self.winner(provenance), close * (self.best_us or 0.0)
        if best is None or best.key.kernel != library_kernel(self.problem.op):
            return None
        own = (each for each in self._losers(provenance) if not each.is_library and not each.is_peer)
        return next((each.entry for each in own if each.median_us <= limit_us), None)

    def _losers(self, provenance: dict[str, Any]) -> list[Contender]:
        """The ok outcomes beside the winner, the fastest first."""
        best = self.winner(provenance)
        others = [
            each for each in self.contenders(provenance)
            if best and (each.entry.key, each.entry.config) != (best.key, best.config)
        ]
        return sorted(others, key=lambda each: each.median_us)

    def library(self, provenance: dict[str, Any]) -> CacheEntry | None:
        """The library's fastest entry."""
        return winner(contender for contender in self.contenders(provenance) if contender.is_library)


def _anything(work: object) -> bool:
    return True


class Schedule:
    """The order of all problems' candidates: the library's for every problem, then another kernel's untuned
    configuration for every problem in each round, then one candidate at a time of the problem where it is worth most:
    each gets trials in proportion to the time that the model spends in it. Of chains' ends one candidate comes after
    every ENDS_AFTER of others, all of them where nothing else is left; an end starts from what was found for its
    product, so it waits for the untuned configurations there.

    A kernel that is not ready, by ``is_ready``, waits, and with it all but the untuned configurations of its problem's
    other kernels.
    """

    def __init__(
        self, searches: Sequence[ProblemSearch], is_ready: Callable[[KernelSearch], bool] = _anything
    ) -> None:
        rounds = itertools.zip_longest(*(search.seeds() for search in searches))
        self._seeds = deque(candidate for each in rounds for candidate in each if candidate is not None)
        self._open = deque(search for search in searches if not search.is_end)
        self._ends = deque(search for search in searches if search.is_end)
        self._since_end = 0
        self._is_ready = is_ready
        self._here = set(searches)

    @property
    def left(self) -> list[ProblemSearch]:
        """The searches that may have more to measure."""
        return [*self._open, *self._ends]

    def is_done(self) -> bool:
        """Whether everything is measured or under way."""
        found = self.next()
        if found is not None:
            self._seeds.appendleft(found)
        return not self._seeds and not self.left

    def drop(self, search: ProblemSearch) -> None:
        """Propose nothing more of a search."""
        self._here.remove(search)
        self._seeds = deque(candidate for candidate in self._seeds if candidate.search is not search)
        (self._ends if search.is_end else self._open).remove(search)

    def leave_out(self, backend: str) -> None:
        """Propose none of a DSL's untuned configurations; its searches leave out the rest."""
        self._seeds = deque(candidate for candidate in self._seeds if candidate.kernel.spec.backend != backend)

    def next(self, fits: Callable[[ProblemSearch], bool] = _anything) -> Candidate | None:
        """The next candidate of a search that ``fits``; None where all of theirs are measured, under way or wait."""
        if self._since_end < ENDS_AFTER:
            candidate = self._product(fits) or self._of(self._ends, fits)
        else:
            candidate = self._of(self._ends, fits) or self._product(fits)
        if candidate is not None:
            self._since_end = self._since_end + 1 if self._since_end < ENDS_AFTER else 0
        return candidate

    def _product(self, fits: Callable[[ProblemSearch], bool]) -> Candidate | None:
        for candidate in self._seeds:
            if fits(candidate.search) and self._is_ready(candidate.kernel):
                self._seeds.remove(candidate)
                return candidate
        return self._of(self._open, fits)

    def _of(self, searches: deque[ProblemSearch], fits: Callable[[ProblemSearch], bool]) -> Candidate | None:
        """The most urgent search's candidate; searches that have none are over."""
        for search in sorted(filter(fits, searches), key=lambda each: each.urgency, reverse=True):
            waits = search.like is not None and search.like in self._here and not search.like.is_begun
            if not waits and all(map(self._is_ready, search.kernels)):
                searches.remove(search)  # of equals it is then the last
                candidate = search.propose()
                if candidate is not None:
                    searches.append(search)
                    return candidate
        return None


def usable_kernels(
    device: DeviceFingerprint, chosen: Iterable[str] | None
) -> tuple[list[KernelSpec], dict[str, str]]:
    """(kernels, backend → why it is not available): those of the chosen backends (None: all) and the library's."""
    known = backends()
    wanted = set(known if chosen is None else chosen) | {"library"}
    reasons = {name: known[name].unavailable(device) for name in sorted(wanted)}
    unavailable = {name: reason for name, reason in reasons.items() if reason is not None}
    usable = [spec for spec in kernels() if spec.backend in wanted and spec.backend not in unavailable]
    return usable, unavailable


def unmeasured_backends(searches: Iterable[ProblemSearch]) -> set[str]:
    """The backends of the problems that have something to measure."""
    return {each.spec.backend for search in searches if search.planned for each in search.kernels}


def problem_search(
    problem: Problem, specs: Sequence[KernelSpec], device: DeviceFingerprint, store: Store, trials: int, seed: int,
    sampler: str = DEFAULT, neighbours: Neighbours | None = None, patience: int | None = None, launches: int = 1,
) -> ProblemSearch:
    """The search of one problem that the model launches so often; NoLegalConfigError where no kernel has a legal
    configuration."""
    found = kernel_searches(problem, specs, device, store, seed, sampler, neighbours)
    return ProblemSearch(problem, found, trials, patience, launches)


def kernel_searches(
    problem: Problem, specs: Sequence[KernelSpec], device: DeviceFingerprint, store: Store, seed: int,
    sampler: str = DEFAULT, neighbours: Neighbours | None = None,
) -> list[KernelSearch]:
    """The search of each kernel that serves a problem; NoLegalConfigError without any."""
    how = How(neighbours or Neighbours(store, device), sampler, seed)
    found, refusals = [], []
    for spec in specs:
        if spec.op != problem.op:
            continue
        legal = spec.legal_space(problem, device)
        if legal:
            found.append(KernelSearch(spec, tuning_key(spec, problem, device), legal, device, store, how))
        else:
            refusals.append(f"{spec.name}: {spec.refusal(problem, device) or 'every configuration exceeds a limit'}")
    if not found:
        raise NoLegalConfigError(
            f"no kernel can run {problem.label()} on {device.name}: {'; '.join(refusals) or 'none exists'}"
        )
    return found
