"""Even splits: each class divided among all owners as evenly as it can be, so that rounds of theirs match."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dmuon_tune.errors import UsageError

from .greedy import longest_first
from .instance import Counts, Instance
from .pairs import improve


def is_even(instance: Instance, counts: Counts) -> bool:
    """Whether no two owners' shares of a class that has a matrix for each owner differ by more than one."""
    shared = counts[instance.counts >= instance.owners]
    return bool(np.ptp(shared, axis=1).max(initial=0) <= 1)


def evenly(instance: Instance, deadline: float) -> Counts | None:
    """As many of each class to every owner as there are for all; the rest, at most one of a class to an owner, the
    longest first and improved until ``deadline`` (monotonic seconds). Of a class with fewer matrices than there are
    owners an owner may get several: they may be faster together. None where memory forbids it."""
    least = instance.counts // instance.owners
    rest = _rest(instance, least)
    try:
        return least[:, None] + improve(rest, longest_first(rest), deadline)
    except UsageError:
        return None


def _rest(instance: Instance, least: Counts) -> Instance:
    """What is left when every owner has ``least`` of each class, which its times count in."""
    left = instance.counts - least * instance.owners
    most = np.where(least > 0, np.minimum(left, 1), left)
    table = np.full((len(left), max(2, int(most.max())) + 1), np.inf)
    for kind, (has, more) in enumerate(zip(least, most, strict=True)):
        table[kind, : more + 1] = instance.table[kind, has : has + more + 1]
    members = tuple(places[:count] for places, count in zip(instance.members, left, strict=True))
    limit = instance.memory_bytes
    free = None if limit is None else limit - int(instance.state_bytes @ least)
    return replace(instance, members=members, table=table, memory_bytes=free)
