"""Local search on an assignment: the slowest owner gives matrices away, or swaps them, as long as that helps."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from .instance import Counts, Instance

MOST_PAIRS = 400_000  # exchanges that one step looks at: about 5 ms
MOST_COPIES = 6  # of one class that change hands at once
GAIN = 1e-9  # relative; less is rounding


@dataclass(frozen=True)
class _Exchange:
    """The slowest owner gives ``give[1]`` matrices of class ``give[0]`` to ``partner`` and takes ``take[1]`` of
    ``take[0]``."""

    partner: int
    give: tuple[int, int]
    take: tuple[int, int]


def improve(instance: Instance, counts: Counts, deadline: float) -> Counts:
    """The best of what exchanges between the slowest owner and any other lead to, each the one after which the slower
    of both is done first. Ends where none helps, or at ``deadline`` (monotonic seconds)."""
    counts = counts.copy()
    copies = _copies(instance)
    while monotonic() < deadline:
        loads = instance.loads(counts)
        slowest = int(np.argmax(loads))
        partners = _partners(instance, counts, loads, copies)
        found = _best_exchange(instance, counts, loads, slowest, partners, copies)
        if found is None:
            break
        for sign, (kind, size) in ((-1, found.give), (1, found.take)):
            counts[kind, slowest] += sign * size
            counts[kind, found.partner] -= sign * size
    return counts


def _copies(instance: Instance) -> int:
    kinds = len(instance.members)
    return max(1, min(MOST_COPIES, int((MOST_PAIRS / instance.owners) ** 0.5 / kinds)))


def _partners(instance: Instance, counts: Counts, loads: NDArray[np.float64], copies: int) -> NDArray[np.int64]:
    """Owners to exchange with: one of each pattern, the lightest as far as they can all be looked at."""
    _, first = np.unique(counts, axis=1, return_index=True)
    most = max(8, MOST_PAIRS // (len(instance.members) * copies) ** 2)
    lightest: NDArray[np.int64] = first[np.argsort(loads[first], kind="stable")][:most]
    return lightest


def _best_exchange(
    instance: Instance, counts: Counts, loads: NDArray[np.float64], slowest: int, partners: NDArray[np.int64],
    copies: int,
) -> _Exchange | None:
    mine, others = counts[:, slowest], counts[:, partners]
    given = [(kind, size) for kind in np.flatnonzero(mine) for size in range(1, min(copies, int(mine[kind])) + 1)]
    taken = [(0, 0), *((kind, size) for kind in range(len(mine)) for size in range(1, copies + 1))]
    give_kinds, give_sizes = (np.array(column, dtype=np.int64) for column in zip(*given, strict=True))
    take_kinds, take_sizes = (np.array(column, dtype=np.int64) for column in zip(*taken, strict=True))
    lighter = _change(instance, mine[:, None], give_kinds, -give_sizes)  # (given, 1)
    heavier = _change(instance, mine[:, None], take_kinds, take_sizes)  # (taken, 1)
    others_give = _change(instance, others, give_kinds, give_sizes)  # (given, partners)
    others_take = _change(instance, others, take_kinds, -take_sizes)  # (taken, partners)
    here = loads[slowest] + lighter + heavier.T  # (given, taken)
    there = loads[partners] + others_give[:, None, :] + others_take[None, :, :]  # (given, taken, partners)
    slower = np.maximum(here[:, :, None], there)
    slower[:, :, partners == slowest] = np.inf
    same = (give_kinds[:, None] == take_kinds) & (take_sizes > 0)
    slower[same] = np.inf
    if instance.memory_bytes is not None:
        state = instance.state_bytes[give_kinds] * give_sizes
        moved = state[:, None] - (instance.state_bytes[take_kinds] * take_sizes)[None, :]
        free = instance.memory_bytes - instance.memory(counts)
        slower[(moved[:, :, None] > free[partners]) | (-moved[:, :, None] > free[slowest])] = np.inf
    place = int(np.argmin(slower))
    if not slower.flat[place] < loads[slowest] * (1 - GAIN):
        return None
    give, take, partner = np.unravel_index(place, slower.shape)
    return _Exchange(int(partners[partner]), given[int(give)], taken[int(take)])


def _change(
    instance: Instance, counts: Counts, kinds: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NDArray[np.float64]:
    """What each owner's load changes by with so many matrices of a class more; inf where it has not so many."""
    held = counts[kinds]
    then = held + sizes[:, None]
    impossible = (then < 0) | (then >= instance.table.shape[1])
    then = np.where(impossible, 0, then)
    change = instance.table[kinds[:, None], then] - instance.table[kinds[:, None], held]
    change[impossible] = np.inf
    return change
