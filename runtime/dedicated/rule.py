"""The rule of ``dedicate(mode="auto")``: owners are dedicated, unless one would do far more than its share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from dmuon_tune.errors import UsageError

if TYPE_CHECKING:
    from .grid import Grid

# Judgements, not measurements. Of Qwen2.5-1.5B's blocks, which are mostly three large matrices, one of eight ranks
# sends 2.5 times an even part, one of sixteen 4.9 times, and of (2, 8) ranks 2.7 times.
MOST_SENT = 3.0
MOST_TIME = 1.25


class UnsuitableError(UsageError):
    """Gathered owners can do it, and dedicated ones cannot."""


def is_even(
    units: Iterable[Sequence[nn.Parameter]], owners: Mapping[nn.Parameter, int], grid: Grid, makespan_us: float,
    divided_us: float,
) -> tuple[bool, str]:
    """Whether owners would do about as much as each other, and that in words; a pure function of what all ranks have.

    ``makespan_us``: of the slowest owner; ``divided_us``: the same if matrices had owners, and not parameters.
    """
    sent, takes = sent_over_even(units, owners, grid), makespan_us / divided_us if divided_us else 1.0
    said = (
        f"of a unit one rank sends {sent:.3g} times an even part (at most {MOST_SENT:g}), and the slowest owner takes "
        f"{takes:.3g} times as long as a gathered one (at most {MOST_TIME:g})"
    )
    return sent <= MOST_SENT and takes <= MOST_TIME, said


def sent_over_even(units: Iterable[Sequence[nn.Parameter]], owners: Mapping[nn.Parameter, int], grid: Grid) -> float:
    """The elements of all units that the ranks at one place of their nodes send, the busiest of each unit's, over what
    would be sent if all places had equal parts."""
    places = {rank: place for row in grid.rows for place, rank in enumerate(row)}
    most = total = 0
    for some in units:
        by_place: Counter[int] = Counter()
        for p in some:
            by_place[places[owners[p]]] += p.numel()
        most += max(by_place.values())
        total += by_place.total()
    return most * len(grid.rows[0]) / total
