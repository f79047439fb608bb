"""Decides what to measure next: rounds over all problems, their kernels' untuned configurations first."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

from .kernel_search import KernelSearch
from .problem_search import Candidate, ProblemSearch

ENDS_AFTER = 4  # a fifth of the candidates: ends are a small part of a step, and start from what their products found


def _anything(work: object) -> bool:
    return True


class Schedule:
    """The order of all problems' candidates: one kernel's untuned configuration for every problem in each round, in the
    order of its kernels, then one candidate at a time of the problem where it is worth most:
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
