"""Local search on an assignment: the slowest owner and another divide what both hold anew, as long as that helps."""

from __future__ import annotations

from time import monotonic

import numpy as np
from numpy.typing import NDArray

from .instance import Counts, Instance

GRID = 256  # parts of the slowest owner's time
PARTNERS = 16  # that one step looks at
GAIN = 1e-9  # relative; less is rounding


def improve(instance: Instance, counts: Counts, deadline: float) -> Counts:
    """What comes of dividing anew, by a knapsack, what the slowest owner and another hold: each time with the partner
    after which the slower of both is done first. Ends where none helps, or at ``deadline`` (monotonic seconds)."""
    counts = counts.copy()
    while monotonic() < deadline:
        loads = instance.loads(counts)
        slowest = int(np.argmax(loads))
        partners = _partners(counts, loads, slowest)
        if not len(partners):
            break
        found = _best_division(instance, counts[:, [slowest]] + counts[:, partners], float(loads[slowest]))
        if found is None:
            break
        place, pattern = found
        partner = partners[place]
        counts[:, partner] += counts[:, slowest] - pattern
        counts[:, slowest] = pattern
    return counts


def _partners(counts: Counts, loads: NDArray[np.float64], slowest: int) -> NDArray[np.int64]:
    """One owner of each pattern, the lightest first."""
    _, first = np.unique(counts, axis=1, return_index=True)
    first = first[loads[first] < loads[slowest]]
    lightest: NDArray[np.int64] = first[np.argsort(loads[first], kind="stable")][:PARTNERS]
    return lightest


def _best_division(instance: Instance, both: Counts, slower_us: float) -> tuple[int, NDArray[np.int64]] | None:
    """(Which pair, one owner's pattern) of the pair whose slower owner is done first, where that is before
    ``slower_us``; ``both`` are each pair's matrices by class. Trying is by parts of time, what is returned exact."""
    parts = np.minimum(np.ceil(instance.table / slower_us * GRID), GRID + 1).astype(np.int64)
    stages = [np.zeros((both.shape[1], GRID + 1))]  # the other's least time, by pair and parts of the one's
    for kind, pairs in enumerate(both):
        stages.append(_with_class(stages[-1], instance.table[kind], parts[kind], pairs))
    slower = np.maximum(stages[-1], np.arange(GRID + 1) * (slower_us / GRID))
    for place in np.argsort(slower.min(axis=1), kind="stable"):
        end = int(np.argmin(slower[place]))
        if not slower[place, end] < slower_us:
            return None
        pattern = _trace([stage[place] for stage in stages], instance.table, parts, both[:, place], end)
        other = both[:, place] - pattern
        us = max(instance.time(pattern), instance.time(other))
        if us < slower_us * (1 - GAIN) and instance.fits(pattern) and instance.fits(other):
            return int(place), pattern
    return None


def _with_class(
    before: NDArray[np.float64], times: NDArray[np.float64], parts: NDArray[np.int64], pairs: NDArray[np.int64]
) -> NDArray[np.float64]:
    after = np.full_like(before, np.inf)
    for size in range(int(pairs.max()) + 1):
        part = int(parts[size])
        if part > GRID:
            continue
        has = pairs >= size
        rest = np.where(has, times[np.where(has, pairs - size, 0)], np.inf)
        np.minimum(after[:, part:], before[:, : GRID + 1 - part] + rest[:, None], out=after[:, part:])
    return after


def _trace(
    stages: list[NDArray[np.float64]], table: NDArray[np.float64], parts: NDArray[np.int64], both: NDArray[np.int64],
    end: int,
) -> NDArray[np.int64]:
    """The pattern of the one owner behind the last stage's ``end``."""
    pattern = np.zeros(len(both), dtype=np.int64)
    for kind in reversed(range(len(both))):
        sizes = np.arange(int(both[kind]) + 1)
        sizes = sizes[parts[kind, sizes] <= end]
        us = stages[kind][end - parts[kind, sizes]] + table[kind, both[kind] - sizes]
        pattern[kind] = sizes[int(np.argmin(us))]
        end -= int(parts[kind, pattern[kind]])
    return pattern
