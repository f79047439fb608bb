"""Column generation: owners are equal, so an assignment is how many owners hold each pattern of matrices.

For a time limit the linear program over patterns says how many owners are needed when they may be fractions, and its
prices bound the slowest owner's time from below; rounding it gives whole owners (Gilmore and Gomory, Operations
Research 9(6), 1961; the bound is Farley's, Operations Research 38(5), 1990, for the limit in place of the number).
"""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from .greedy import place
from .highs import TOLERANCE, Master, Relaxed
from .instance import Counts, Instance
from .patterns import GRID, Pattern, Pricing

NOISE = 0.3  # of the shares that decide which pattern is rounded up next


class Columns:
    """The patterns found so far, and in ``bound_us`` the best bound that they led to, until ``deadline`` (monotonic).

    Memory limits which patterns are kept. The bound knows no memory: it holds with a limit all the more. SolverError
    where HiGHS fails.
    """

    def __init__(self, instance: Instance, counts: Counts, bound_us: float, deadline: float) -> None:
        self._instance, self.deadline = instance, deadline
        self.bound_us = bound_us
        kinds = len(instance.members)
        alone = [tuple(int(kind == other) for other in range(kinds)) for kind in range(kinds)]
        self._patterns: dict[Pattern, float] = {}  # with their times
        for pattern in [*map(tuple, counts.T.tolist()), *alone]:
            self._keep(pattern)

    def relax(self, limit_us: float) -> float:
        """How many owners of at most ``limit_us`` are needed when they may be fractions: exactly where that is more
        than there are, else no more than the result. Raises the bound by what was learnt on the way."""
        instance = self._instance
        up, down = (Pricing.of(instance.table, limit_us, round_up) for round_up in (True, False))
        master = Master(instance.counts, self._within(limit_us))
        for relaxed, worth in self._grow(master, up):
            if relaxed.owners <= instance.owners + TOLERANCE:
                return relaxed.owners
            if relaxed.owners > instance.owners * worth:  # it will not fit: how far off is it?
                self._raise_bound(down, relaxed.values)
                if self.bound_us >= limit_us:
                    return relaxed.owners
        self._raise_bound(down, relaxed.values)
        return relaxed.owners

    def dive(self, limit_us: float, rng: Generator) -> Counts | None:
        """Whole owners by rounding: what the program takes at least once is kept, the program solved for the rest. What
        no owner is left for goes to the least loaded ones, above the limit. None where memory forbids that."""
        instance = self._instance
        counts = np.zeros((len(instance.members), instance.owners), dtype=np.int64)
        needed, used = instance.counts, 0
        sizes = np.arange(instance.table.shape[1])
        while needed.any() and used < instance.owners and monotonic() < self.deadline:
            table = np.where(sizes <= needed[:, None], instance.table, np.inf)
            fitting = (p for p in self._within(limit_us) if all(k <= most for k, most in zip(p, needed, strict=True)))
            master = Master(needed, fitting)
            for relaxed, _ in self._grow(master, Pricing.of(table, limit_us, round_up=True)):
                shares = relaxed.shares
            for pattern in _rounded(master.patterns, shares, rng):
                taken = np.minimum(pattern, needed)
                if used < instance.owners and taken.any():
                    counts[:, used] = taken
                    needed, used = needed - taken, used + 1
        return place(instance, counts, needed, instance.longest_first)

    def pack(self, limit_us: float, seconds: float, seed: int) -> Counts | None:
        """Whole owners of at most ``limit_us``, of the patterns there are, by branch and bound; None where none were
        found."""
        instance = self._instance
        master = Master(instance.counts, self._within(limit_us))
        chosen = master.whole(instance.owners, seconds, seed)
        if chosen is None:
            return None
        columns = np.repeat(np.array(master.patterns, dtype=np.int64).T, chosen, axis=1)
        counts = np.zeros((len(instance.members), instance.owners), dtype=np.int64)
        counts[:, : columns.shape[1]] = columns
        return _without_surplus(instance, counts)

    def _grow(self, master: Master, pricing: Pricing) -> Iterator[tuple[Relaxed, float]]:
        """(The program's solution, the most that a pattern is worth in owners), each with the pattern before added;
        ends when none is worth more than an owner."""
        while True:
            relaxed = master.solve()
            most, pattern = pricing.best(relaxed.values)
            yield relaxed, float(most[-1])
            if most[-1] <= 1 + TOLERANCE or monotonic() > self.deadline:
                return
            pattern = self._within_memory(pattern, relaxed.values)
            if pattern in master.patterns:
                return
            self._keep(pattern)
            master.add(pattern)

    def _raise_bound(self, down: Pricing, values: NDArray[np.float64]) -> None:
        """Some owner holds matrices worth the mean; no pattern in less time than the bound is worth that."""
        mean = values @ self._instance.counts / self._instance.owners
        least = int(np.searchsorted(down.best(values)[0], mean - TOLERANCE))
        self.bound_us = max(self.bound_us, least * down.limit_us / GRID)

    def _keep(self, pattern: Pattern) -> None:
        self._patterns[pattern] = self._instance.time(pattern)

    def _within(self, limit_us: float) -> list[Pattern]:
        return [pattern for pattern, us in self._patterns.items() if us <= limit_us]

    def _within_memory(self, pattern: Pattern, values: NDArray[np.float64]) -> Pattern:
        """The pattern without those matrices that are worth least for their memory, until it fits."""
        limit, state = self._instance.memory_bytes, self._instance.state_bytes
        if limit is None:
            return pattern
        held = np.array(pattern, dtype=np.int64)
        for kind in np.argsort(values / np.maximum(state, 1), kind="stable"):
            over = int(state @ held) - limit
            if over > 0 and state[kind]:
                held[kind] -= min(int(held[kind]), -(-over // int(state[kind])))
        return tuple(held.tolist())


def _rounded(patterns: list[Pattern], shares: NDArray[np.float64], rng: Generator) -> list[Pattern]:
    """The patterns that are taken at least once, as often as that; else the one with the largest share, by some
    chance."""
    whole = np.floor(shares + TOLERANCE).astype(np.int64)
    if not whole.any():
        whole[np.argmax(shares * (1.0 - NOISE * rng.random(len(shares))))] = 1
    return [pattern for pattern, count in zip(patterns, whole, strict=True) for _ in range(count)]


def _without_surplus(instance: Instance, counts: Counts) -> Counts:
    """Patterns may hold more of a class than there are: the slowest owner that holds one gives it up, and so on."""
    for kind, surplus in enumerate(counts.sum(axis=1) - instance.counts):
        for _ in range(int(surplus)):
            loads = np.where(counts[kind] > 0, instance.loads(counts), -1.0)
            counts[kind, int(np.argmax(loads))] -= 1
    return counts
