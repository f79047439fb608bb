"""The start of every assignment: longest processing time first, each matrix to the owner that is then done first."""

from __future__ import annotations

from heapq import heapify, heapreplace

import numpy as np

from dmuon_tune.errors import UsageError
from dmuon_tune.words import counted

from .instance import Counts, Instance


def longest_first(instance: Instance) -> Counts:
    """Matrices by the time of one alone, the longest first, each to the owner whose load with it is least (LPT, where a
    matrix costs what it adds to its owner's batch). Where memory runs out that way, the largest state first; UsageError
    where that fails too."""
    nobody = np.zeros((len(instance.members), instance.owners), dtype=np.int64)
    for order in (instance.table[:, 0] - instance.table[:, 1], -instance.state_bytes):
        counts = place(instance, nobody, instance.counts, [int(kind) for kind in np.argsort(order, kind="stable")])
        if counts is not None:
            return counts
    raise UsageError(
        f"found no way to divide the matrices' state among {counted(instance.owners, 'owner')} of "
        f"{counted(instance.memory_bytes or 0, 'byte')}; raise the limit or take more owners"
    )


def place(instance: Instance, held: Counts, rest: Counts, order: list[int]) -> Counts | None:
    """``held`` with the matrices of ``rest`` (by class) put one by one to the owner whose load is then least, a class
    after the other in ``order``; None where one fits no owner's memory."""
    counts = held.copy()
    loads, state = instance.loads(counts), instance.memory(counts)
    limit = np.inf if instance.memory_bytes is None else instance.memory_bytes
    for kind in order:
        if not rest[kind]:
            continue
        times, size = instance.table[kind], int(instance.state_bytes[kind])

        def then(owner: int, times: Counts = times, size: int = size, kind: int = kind) -> tuple[float, int]:
            now = counts[kind, owner]
            free = state[owner] + size <= limit
            return (float(loads[owner] + times[now + 1] - times[now]) if free else np.inf), owner

        queue = [then(owner) for owner in range(instance.owners)]
        heapify(queue)
        for left in range(int(rest[kind]), 0, -1):
            load, owner = queue[0]
            if load == np.inf:
                return None
            counts[kind, owner] += 1
            loads[owner], state[owner] = load, state[owner] + size
            if left > 1:
                heapreplace(queue, then(owner))
    return counts
