"""A model's matrices as work for owners, and the batches of them that owners run: in training, and to plan and tune."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dmuon_tune.recipe import Group, groups

from ..ownership import Costs, Element, Work
from .rounds import Item, rounds

Price = Callable[[Iterable[Group], Element], Mapping[tuple[int, int], Costs]]  # of all groups, by (rows, cols)


@dataclass(frozen=True)
class Owned:
    """One matrix, of the model's block ``layer``; ``element``: what its owner moves of it."""

    rows: int
    cols: int
    layer: int
    element: Element


def work_of(matrices: Sequence[Owned], price: Price, bucket_bytes: int) -> list[Work]:
    """What each matrix costs its owner, whose batches are at most ``bucket_bytes`` (or one matrix)."""
    counts = Counter((each.rows, each.cols) for each in matrices)
    every = [Group(count, rows, cols) for (rows, cols), count in counts.items()]
    costs = {
        (rows, cols, element): priced.within(max(1, bucket_bytes // (rows * cols * element.carried)))
        for element in dict.fromkeys(each.element for each in matrices)
        for (rows, cols), priced in price(every, element).items()
    }
    return [
        Work(each.rows, each.cols, each.layer, costs[each.rows, each.cols, each.element],
             each.rows * each.cols * each.element.momentum)
        for each in matrices
    ]


def batches_of(matrices: Sequence[Owned], owner: Sequence[int], world: int, bucket_bytes: int) -> list[Group]:
    """The batches that ``world`` owners run in a step in which all matrices move, each size once."""
    items = [
        Item(place, (each.element.gradient, each.element.weight), each.rows, each.cols, its,
             each.rows * each.cols * each.element.carried)
        for place, (each, its) in enumerate(zip(matrices, owner, strict=True))
    ]
    found: dict[Group, None] = {}
    for one in rounds(items, world, bucket_bytes):
        for batch in filter(None, one.batches):
            first = matrices[batch[0]]
            found |= dict.fromkeys(groups([(first.rows, first.cols)] * len(batch)))
    return list(found)
