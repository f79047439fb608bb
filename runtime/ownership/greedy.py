"""The start of every assignment: longest processing time first, each matrix to the owner that is then done first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dmuon_tune.errors import UsageError
from dmuon_tune.words import counted

from .instance import Counts, Instance


def longest_first(instance: Instance) -> Counts:
    """Matrices by the time of one alone, the longest first, each to the owner whose load with it is least (LPT, where a
    matrix costs what it adds to its owner's batch). Where memory runs out that way, the largest state first; UsageError
    where that fails too."""
    for order in (-instance.table[:, 1], -instance.state_bytes):
        counts = _placed(instance, np.argsort(order, kind="stable"))
        if counts is not None:
            return counts
    raise UsageError(
        f"found no way to divide the matrices' state among {counted(instance.owners, 'owner')} of "
        f"{instance.memory_bytes} bytes; raise the limit or take more owners"
    )


def _placed(instance: Instance, order: NDArray[np.int64]) -> Counts | None:
    """None where a matrix fits no owner's memory."""
    counts = np.zeros((len(instance.members), instance.owners), dtype=np.int64)
    loads = np.zeros(instance.owners)
    free = np.full(instance.owners, np.inf if instance.memory_bytes is None else float(instance.memory_bytes))
    for kind in order:
        times, state = instance.table[kind], int(instance.state_bytes[kind])
        for _ in instance.members[kind]:
            held = counts[kind]
            then = np.where(free >= state, loads + times[held + 1] - times[held], np.inf)
            owner = int(np.argmin(then))
            if not np.isfinite(then[owner]):
                return None
            counts[kind, owner] += 1
            loads[owner], free[owner] = then[owner], free[owner] - state
    return counts
