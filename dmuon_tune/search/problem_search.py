"""One problem's search over all kernels that serve it: what it knows, what it tries next, and who wins."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dmuon_tune.cache import CacheEntry, Store
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.measure import untuned
from dmuon_tune.measure.winners import TIE, Contender, library_kernel, winner
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.spec import KernelSpec

from .kernel_search import KernelSearch, kernel_searches
from .neighbours import Neighbours
from .samplers import DEFAULT

MOST_RIVALS = 3  # that are tried in the winner's place inside a chain
FAIR_TRIALS = 3  # configurations of a kernel before it may be left behind
FAR_BEHIND = 1.3  # times the best: no space hides its best so far below its untuned choice unless that is bad
HIDDEN = 1.8  # over their number: by how much the best may be faster than those tried (docs/search.md: 18 % at 10)
ADOPT_EVERY = 3  # trials, of which one is a configuration that is the fastest elsewhere


@dataclass(frozen=True)
class Candidate:
    """A configuration to measure; ``kernel`` learns its outcome."""

    search: ProblemSearch
    kernel: KernelSearch
    config: Any


class ProblemSearch:
    """One problem's search over all kernels that serve it: first the one that training runs where nothing is tuned, so
    that a run which ends early leaves nothing slower, then the library."""

    is_end = False
    like: ProblemSearch | None = None  # of an end: the search of the product that it stands for
    siblings: Sequence[ProblemSearch] = ()  # other problems' searches of this operation, the likest first

    def __init__(
        self, problem: Problem, kernel_searches: list[KernelSearch], trials: int, patience: int | None = None,
        launches: int = 1,
    ) -> None:
        self.problem, self.trials = problem, trials
        self.kernels = sorted(
            kernel_searches,
            key=lambda each: (not _runs_untuned(each, kernel_searches), each.key.kernel != library_kernel(problem.op)),
        )
        self._patience, self._launches = patience, launches
        self._next_kernel = 0
        self.reused = self.known
        self._proposed = self.reused
        self.best_us = min(self._medians(), default=None)
        self._in_vain: Counter[KernelSearch] = Counter()  # configurations since its last that beat all before
        self._mark_us = math.inf
        before = [(each, outcome) for each in self.kernels for outcome in each.outcomes]
        for kernel, outcome in sorted(before, key=lambda found: found[1][2].created_at if found[1][2] else ""):
            self._count(kernel, outcome[1])

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

    def _count(self, kernel: KernelSearch, measurement: Measurement) -> None:
        self._in_vain[kernel] += 1
        if measurement.median_us is not None and measurement.median_us * TIE < self._mark_us:
            self._in_vain[kernel], self._mark_us = 0, measurement.median_us

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
        """Whether more trials are not worth their time: of each kernel that is not far behind ``patience``
        configurations in a row were no faster than the best of all beyond noise, or an earlier run ended this search in
        a race after as many trials."""
        patience = self._patience
        if patience is not None and self.best_us is not None:
            if all(self._is_spent(each, patience) for each in self.kernels):
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
        adopted = None if self._proposed % ADOPT_EVERY else self._adopted()
        if adopted is not None:
            self._proposed += 1
            return adopted
        turns = [self.kernels[(self._next_kernel + turn) % len(self.kernels)] for turn in range(len(self.kernels))]
        for each in sorted(turns, key=self._is_behind):  # stable: in turn, those far behind only where the rest is done
            config = each.proposer.propose()
            if config is not None:
                self._next_kernel = self.kernels.index(each) + 1
                self._proposed += 1
                return Candidate(self, each, config)
        return None

    def _adopted(self) -> Candidate | None:
        """What is the fastest for the likest sibling by a kernel that is not far behind here, if it is new here."""
        for each in self.kernels:
            if self._is_behind(each):
                continue
            for sibling in self.siblings:
                config = sibling.fastest_by(each.spec.name)
                if config is not None and each.proposer.reserve(config):
                    return Candidate(self, each, config)
        return None

    def fastest_by(self, kernel: str) -> Any | None:
        """A kernel's configuration of the smallest median; None where none is ok."""
        return next((config for name, config in self.fastest() if name == kernel), None)

    def leave_out(self, backend: str) -> None:
        """Forget the kernels of a DSL and what is known of them."""
        gone = [each for each in self.kernels if each.spec.backend == backend]
        self.kernels = [each for each in self.kernels if each not in gone]
        self._next_kernel = 0
        self.reused -= sum(len(each.outcomes) for each in gone)
        reserved = sum(each.needs_seed and not each.proposer.reserve(each.untuned) for each in gone)
        self._proposed -= reserved + sum(len(each.outcomes) for each in gone)
        self.best_us = min(self._medians(), default=None)

    def _is_spent(self, kernel: KernelSearch, patience: int) -> bool:
        """Whether a kernel has had its share of patience, or deserves none."""
        return self._in_vain[kernel] >= patience or not kernel.proposer.unseen or self._is_behind(kernel)

    def _is_behind(self, kernel: KernelSearch) -> bool:
        """Whether all of a kernel's configurations, FAIR_TRIALS or more, failed or are slower than the problem's best
        by more than what is still to be found in its space."""
        tried = len(kernel.outcomes)
        if tried < FAIR_TRIALS:
            return False
        best_us = min((m.median_us for _, m, _ in kernel.outcomes if m.median_us is not None), default=math.inf)
        return best_us > min(FAR_BEHIND, 1 + HIDDEN / tried) * (self.best_us or math.inf)

    def observe(self, candidate: Candidate, measurement: Measurement) -> None:
        candidate.kernel.observe(candidate.config, measurement)
        self._count(candidate.kernel, measurement)
        self.best_us = min(self._medians(), default=None)

    def refresh(self, store: Store) -> int:
        """Take what the store holds now, while nothing of this search is under way; returns how much of it is new."""
        new = [(each, measurement) for each in self.kernels for measurement in each.refresh(store)]
        for kernel, measurement in new:
            self._count(kernel, measurement)
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


def _runs_untuned(kernel: KernelSearch, among: Sequence[KernelSearch]) -> bool:
    """Whether training runs this one where nothing is tuned."""
    found = untuned.choice(kernel.key.problem, [each.spec for each in among], kernel.key.device)
    return found is not None and found[0] is kernel.spec


def problem_search(
    problem: Problem, specs: Sequence[KernelSpec], device: DeviceFingerprint, store: Store, trials: int, seed: int,
    sampler: str = DEFAULT, neighbours: Neighbours | None = None, patience: int | None = None, launches: int = 1,
) -> ProblemSearch:
    """The search of one problem that the model launches so often; NoLegalConfigError where no kernel has a legal
    configuration."""
    found = kernel_searches(problem, specs, device, store, seed, sampler, neighbours)
    return ProblemSearch(problem, found, trials, patience, launches)


def unmeasured_backends(searches: Iterable[ProblemSearch]) -> set[str]:
    """The backends of the problems that have something to measure."""
    return {each.spec.backend for search in searches if search.planned for each in search.kernels}
