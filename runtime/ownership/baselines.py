"""Assignments that know no batch costs, to set an assignment beside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import heapify, heapreplace

from dmuon_tune.recipe import Group

from .instance import Work
from .pricing import flops

Owners = tuple[int, ...]


def round_robin(work: Sequence[Work], owners: int) -> Owners:
    """In model order, each matrix to the next owner."""
    return tuple(place % owners for place in range(len(work)))


def count_balanced(work: Sequence[Work], owners: int) -> Owners:
    """In model order, the first owner's first, as many to each."""
    return tuple(place * owners // len(work) for place in range(len(work)))


def flop_balanced(work: Sequence[Work], owners: int) -> Owners:
    """The most FLOPs first, each matrix to the owner of the fewest so far (LPT)."""
    owner = [0] * len(work)
    queue = [(0.0, each) for each in range(owners)]
    heapify(queue)
    sizes = [flops(Group(1, item.rows, item.cols)) for item in work]
    for place in sorted(range(len(work)), key=lambda place: (-sizes[place], place)):
        load, owner[place] = queue[0]
        heapreplace(queue, (load + sizes[place], owner[place]))
    return tuple(owner)


def loads_us(work: Sequence[Work], owner: Sequence[int], owners: int) -> tuple[float, ...]:
    """Each owner's time in microseconds, its equal matrices taken together."""
    batches = Counter(
        (its, item.rows, item.cols, item.state_bytes, id(item.costs))
        for its, item in zip(owner, work, strict=True)
    )
    costs = {id(item.costs): item.costs for item in work}
    loads = [0.0] * owners
    for (its, _, _, _, priced), batch in batches.items():
        loads[its] += costs[priced].us(batch)
    return tuple(loads)
