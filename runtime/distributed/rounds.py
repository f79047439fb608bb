"""Rounds: in each one every owner receives, orthogonalizes and returns one batch of equal matrices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from dmuon_tune.recipe import Group, pieces

from ..ownership.pricing import flops

BUCKET_BYTES = 2**28  # of an owner's batch; its gradients, its updates and what is in flight are each at most that
DEPTH = 2  # rounds whose gradients are under way

Lane = tuple[Any, Any]


@dataclass(frozen=True)
class Item:
    """Matrix ``place``, to be sent; ``lane``: the dtypes in which it goes and comes back, which a round shares."""

    place: int
    lane: Lane
    rows: int
    cols: int
    owner: int
    nbytes: int


@dataclass(frozen=True)
class Round:
    """The places of the matrices of each owner's batch (none: it has nothing to do in this round)."""

    lane: Lane
    batches: tuple[tuple[int, ...], ...]


def rounds(items: Sequence[Item], world: int, bucket_bytes: int) -> tuple[Round, ...]:
    """Divide all matrices into rounds of ``world`` owners' batches of at most ``bucket_bytes`` (or one matrix).

    Every owner's batches go by their FLOPs, the most first. A round takes as long as its longest batch, and the sum of
    these is least when all owners' batches are in that order; what is left at the end, which nothing hides, is small.
    A pure function of its arguments, so every rank has the same rounds.
    """
    kinds: dict[tuple[Lane, int, int, int], list[Item]] = {}
    for item in items:
        kinds.setdefault((item.lane, item.rows, item.cols, item.owner), []).append(item)
    by_lane: dict[Lane, list[list[_Batch]]] = defaultdict(lambda: [[] for _ in range(world)])
    for (lane, rows, cols, owner), some in kinds.items():
        most = max(1, bucket_bytes // some[0].nbytes)
        by_lane[lane][owner] += _batches([item.place for item in some], rows, cols, most)
    return tuple(
        Round(lane, tuple(batch.places if batch else () for batch in batches))
        for lane, owned in by_lane.items() for batches in zip_longest(*map(sorted, owned))
    )


class _Batch(NamedTuple):
    """In the order in which an owner runs its batches."""

    flops: float  # negative
    rows: int
    cols: int
    places: tuple[int, ...]


def _batches(places: Sequence[int], rows: int, cols: int, most: int) -> Iterator[_Batch]:
    start = 0
    for size in pieces(len(places), most):
        yield _Batch(-flops(Group(size, rows, cols)), rows, cols, tuple(places[start : start + size]))
        start += size
