"""Shares work out among a run's devices: a problem, and a group's chains, are measured on one of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from dmuon_tune.measure.executor import Executor
from dmuon_tune.measure.fleet import Fleet

from .problem_search import Candidate, ProblemSearch
from .recipes import ChainSearch
from .schedule import Schedule


class Homes:
    """Which device has which problem and which group: the first that was free for it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._home: dict[ProblemSearch | ChainSearch, Executor] = {}

    def next_candidate(
        self, schedule: Schedule, busy: Collection[ProblemSearch]
    ) -> tuple[Executor, Candidate] | None:
        """A free device and what to measure there; None where nothing fits.

        Of its own problems or of new ones; where these are done, of another device's of which nothing is under way
        (not in ``busy``), which is its own from then on: the finalists race on one device in any case.
        """
        for executor in self._fleet.with_room():
            candidate = schedule.next(self._own(executor)) or schedule.next(lambda search: search not in busy)
            if candidate is not None:
                self._home[candidate.search] = executor
                return executor, candidate
        return None

    def next_chain(self, waiting: Sequence[ChainSearch]) -> tuple[Executor, ChainSearch] | None:
        """A free device and the first group for it; a group never moves: its chains are compared within 1 %."""
        for executor in self._fleet.with_room():
            for search in waiting:
                if self._home.setdefault(search, executor) is executor:
                    return executor, search
        return None

    def _own(self, executor: Executor) -> Callable[[ProblemSearch], bool]:
        return lambda search: self._home.get(search, executor) is executor
