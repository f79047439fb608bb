"""Rounds: in each one every owner receives, orthogonalizes and returns one batch of equal matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from dmuon_tune.recipe import pieces

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

    The largest matrices come first: what is left at the end, which nothing hides, is small. A pure function of its
    arguments, so every rank has the same rounds.
    """
    by_lane: dict[Lane, list[list[tuple[int, ...]]]] = {}
    by_kind: dict[tuple[Lane, int, int], list[list[Item]]] = {}
    for item in items:
        by_lane.setdefault(item.lane, [[] for _ in range(world)])
        kind = by_kind.setdefault((item.lane, item.rows, item.cols), [[] for _ in range(world)])
        kind[item.owner].append(item)
    for (lane, _, _), owned in sorted(by_kind.items(), key=lambda known: -known[0][1] * known[0][2]):
        for owner, some in enumerate(owned):
            if some:
                most = max(1, bucket_bytes // some[0].nbytes)
                by_lane[lane][owner] += _batches([item.place for item in some], most)
    return tuple(
        Round(lane, tuple(batches)) for lane, owned in by_lane.items() for batches in zip_longest(*owned, fillvalue=())
    )


def _batches(places: Sequence[int], most: int) -> list[tuple[int, ...]]:
    found, start = [], 0
    for size in pieces(len(places), most):
        found.append(tuple(places[start : start + size]))
        start += size
    return found
