"""Who owns which parameter: as the owners of matrices are chosen, but one that is several matrices has one owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.matrices import layer_of
from dmuon_tune.recipe import Group

from ..distributed.control import Control
from ..distributed.placement import nodes_of
from ..distributed.rounds import BUCKET_BYTES
from ..distributed.workload import Owned, work_of
from ..newton_schulz import GramNewtonSchulz
from ..ownership import Assignment, Costs, Element, Point, Work, assign, costs_of
from ..ownership_options import OwnershipOptions


@dataclass(frozen=True)
class Candidate:
    """A parameter, and the (rows, cols) of its matrices."""

    name: str
    dtype: torch.dtype
    shapes: tuple[tuple[int, int], ...]


def owners_of(
    candidates: Sequence[Candidate], chains: GramNewtonSchulz, device: torch.device, control: Control,
    search: OwnershipOptions,
) -> tuple[Assignment, float]:
    """Decided by the first rank, by its caches' costs, and the microseconds of the slowest owner if each matrix had its
    own; collective."""

    def price(every: Iterable[Group], element: Element) -> dict[tuple[int, int], Costs]:
        arithmetic = chains.steps, chains.restarts
        return costs_of(every, fingerprint(str(device)), chains.dtype, chains._layers, *arithmetic, element)

    def decided() -> list[Any]:
        owned = [
            Owned(rows, cols, layer_of(each.name), Element(*[each.dtype.itemsize] * 3))
            for each in candidates for rows, cols in each.shapes
        ]
        apart = work_of(owned, price, BUCKET_BYTES)
        priced = iter(apart)
        every = [[next(priced) for _ in each.shapes] for each in candidates]
        alike = Counter(each.shapes for each in candidates)
        merged: dict[tuple[Any, ...], Costs] = {}
        work = [_merged(its, alike[each.shapes], merged) for its, each in zip(every, candidates, strict=True)]
        nodes = nodes_of(control.ranks)
        solved = assign(work, control.size, nodes=nodes, **vars(search))
        divided = assign(apart, control.size, nodes=nodes, **vars(search)) if len(apart) > len(work) else solved
        return [solved.owner, solved.loads_us, solved.bound_us, solved.method, divided.makespan_us]

    owner, loads_us, bound_us, method, divided_us = control.decide(decided, "owners")
    return Assignment(tuple(owner), tuple(loads_us), bound_us, method), divided_us


def _merged(its: Sequence[Work], alike: int, known: dict[tuple[Any, ...], Costs]) -> Work:
    """A parameter's matrices as one; an owner runs those of up to ``alike`` such parameters together."""
    if len(its) == 1:
        return its[0]
    each = Counter(work.costs for work in its)
    key = tuple(each.items())
    if key not in known:
        times = {batch: sum(costs.us(count * batch) for costs, count in each.items()) for batch in range(1, alike + 1)}
        known[key] = Costs.of(Point(batch, us) for batch, us in times.items())
    rows, cols, nbytes = sum(work.rows for work in its), its[0].cols, sum(work.state_bytes for work in its)
    return Work(rows, cols, its[0].layer, known[key], nbytes)
