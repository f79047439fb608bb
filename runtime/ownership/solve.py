"""The order of the passes: longest first, local search, column generation as long as time allows, then even splits."""

from __future__ import annotations

from dataclasses import dataclass
from logging import getLogger
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np
from numpy.random import Generator

from .bounds import simple_bound
from .even import evenly, is_even
from .greedy import longest_first
from .instance import Counts, Instance
from .pairs import improve

if TYPE_CHECKING:
    from .columns import Columns

CLOSE = 1e-3  # a slowest owner this near the bound, relatively, is near enough
EVEN = 0.01  # that an even split may cost more, relatively
PASSES = 8  # of rounding; the same for all machines that have the time
SEARCHING, BOUNDING = 0.15, 0.6  # of the time at most
PACKING = 0.25  # of the time that is left, for one search by branch and bound

logger = getLogger("dmuon_tune.runtime")


@dataclass(frozen=True)
class Solution:
    """``counts`` by class and owner, a bound in microseconds, and what found them."""

    counts: Counts
    bound_us: float
    method: str


def solve(instance: Instance, seconds: float, seed: int) -> Solution:
    """As good as ``seconds`` allow, or an even split where that is about as good; with 0 the longest first alone."""
    start = monotonic()
    found = _searched(instance, seconds, seed, start)
    if seconds <= 0 or is_even(instance, found.counts):
        return found
    counts = evenly(instance, start + seconds)
    longest_first_us = float(instance.loads(longest_first(instance)).max())  # which no assignment is to be worse than
    most_us = min(float(instance.loads(found.counts).max()) * (1 + EVEN), longest_first_us)
    if counts is None or instance.loads(counts).max() > most_us:
        return found
    return Solution(counts, found.bound_us, "even split")


def _searched(instance: Instance, seconds: float, seed: int, start: float) -> Solution:
    counts, bound_us = longest_first(instance), simple_bound(instance)
    if seconds <= 0:
        return Solution(counts, bound_us, "longest first")
    by_columns = has_highs()
    counts = improve(instance, counts, start + seconds * (SEARCHING if by_columns else 1.0))
    found = Solution(counts, bound_us, "local search")
    if _is_close(instance, found) or not by_columns:
        return found
    return _by_columns(instance, found, start, seconds, seed)


def has_highs() -> bool:
    """Whether the solver that column generation needs is installed (the extra ``ownership``)."""
    try:
        import highspy  # noqa: F401
    except Exception:  # a broken installation stops no training
        return False
    return True


def _is_close(instance: Instance, found: Solution) -> bool:
    return bool(instance.loads(found.counts).max() <= found.bound_us * (1 + CLOSE))


def _by_columns(instance: Instance, start: Solution, began: float, seconds: float, seed: int) -> Solution:
    from .columns import Columns
    from .highs import SolverError

    columns = Columns(instance, start.counts, start.bound_us, began + seconds)
    best, rng = start, np.random.default_rng(seed)
    try:
        slowest_us = float(instance.loads(start.counts).max())
        limit_us = _least_limit(instance, columns, slowest_us, began + BOUNDING * seconds)
        best = Solution(start.counts, columns.bound_us, "column generation")
        for number in range(PASSES):
            for by_rounding in (True, False):
                if _is_close(instance, best) or monotonic() > columns.deadline:
                    return best
                best = _better(instance, columns, best, limit_us, number, rng if by_rounding else None, seed)
    except SolverError as error:  # what there is by then is an assignment, too
        logger.warning("owners are chosen without further column generation: %s", error)
    return best


def _better(
    instance: Instance, columns: Columns, best: Solution, limit_us: float, number: int, rng: Generator | None, seed: int
) -> Solution:
    """The better of ``best`` and what pass ``number`` finds by rounding (with ``rng``) or by branch and bound."""
    slowest_us = float(instance.loads(best.counts).max())
    if rng is not None:
        counts = columns.dive(min(limit_us * (1 + 0.0015 * 1.7**number), (limit_us + slowest_us) / 2), rng)
    else:
        counts = columns.pack(slowest_us * (1 - CLOSE), PACKING * (columns.deadline - monotonic()), seed + number)
    if counts is None:
        return best
    counts = improve(instance, counts, columns.deadline)
    better = instance.loads(counts).max() < slowest_us
    return Solution(counts, columns.bound_us, "column generation") if better else best


def _least_limit(instance: Instance, columns: Columns, slowest_us: float, deadline: float) -> float:
    """About the least time within which fractions of owners hold all, in microseconds; raises the columns' bound up to
    it. ``slowest_us`` is a time within which whole ones do."""
    low, high = columns.bound_us, slowest_us
    limit = low * (1 + CLOSE)
    while high - low > CLOSE / 2 * low and monotonic() < deadline:
        needed = columns.relax(limit)
        if needed <= instance.owners * (1 + 1e-6):
            high = limit
        else:
            low = max(limit, columns.bound_us)
        # As if time and owners could be traded; else in the middle.
        traded = limit * needed / instance.owners * (1 + CLOSE / 4)
        limit = traded if low * (1 + CLOSE / 4) < traded < high * (1 - CLOSE / 4) else (low + high) / 2
    return high
