"""Where a unit's matrices lie: each owner's together, those of one place of all nodes together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dmuon_tune.runtime.dedicated.grid import Grid
from dmuon_tune.runtime.dedicated.unit import Member, Packing, Sums

SHAPES, OWNERS = [(5, 7), (16, 16), (3, 100), (1, 1), (40, 8)], [3, 0, 3, 1, 0]


def members() -> list[Member]:
    wholes: Any = [type("Owned", (), {"owner": owner}) for owner in OWNERS]
    return [Member(whole, nn.Parameter(torch.zeros(shape))) for whole, shape in zip(wholes, SHAPES, strict=True)]


def grid(rows: tuple[tuple[int, ...], ...], rank: int) -> Grid:
    node = next(node for node, row in enumerate(rows) if rank in row)
    groups: Any = (None, None)
    return Grid(rows, node, rows[node].index(rank), *groups)


@pytest.mark.parametrize("rows", [((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0, 2), (1, 3))], ids=str)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_each_part_is_one_piece_of_the_buffer(rows: tuple[tuple[int, ...], ...], itemsize: int) -> None:
    some, dtype = members(), {2: torch.bfloat16, 4: torch.float32}[itemsize]
    for rank in range(4):
        packing = Packing(some, grid(rows, rank), itemsize)
        flat = torch.full((packing.numel,), -1, dtype=dtype)
        for place, view in enumerate(packing.views(flat)):
            assert (view == -1).all(), "no two lie over each other"
            assert (view.data_ptr() - flat.data_ptr()) % 256 == 0
            view.fill_(place)
        assert torch.equal(torch.cat(packing.sections(flat)), flat)
        place = next(row.index(rank) for row in rows if rank in row)
        section = packing.sections(flat)[place].clone()
        segments = packing.segments(section)
        assert torch.equal(torch.cat(segments), section) and all(len(segment) for segment in segments)
        for node, row in enumerate(rows):
            owned = [one for one, owner in enumerate(OWNERS) if owner == row[place]]
            assert {int(value) for value in segments[node].unique()} - {-1} == set(owned)
            if row[place] == rank:
                views = packing.own(segments[node], owned)
                assert [tuple(view.shape) for view in views] == [SHAPES[one] for one in owned]
                assert all((view == one).all() for one, view in zip(owned, views, strict=True))


def test_sums_keep_what_waits_and_forget_what_was_dropped() -> None:
    some = members()
    sums = Sums(some, torch.float32, torch.device("cpu"), grid(((0, 1, 2, 3),), 0))
    for turn, before in enumerate((None, torch.ones(1), None)):
        for place in (0, 2):
            sums.hold(place, before)
            sums.add(place, torch.full(SHAPES[place], turn + 1.0))
        sums.fresh.clear()
    packed = sums.taken(len(some))
    found = [float(view.flatten()[0]) for view in sums.packing.views(packed)]
    assert found == [3, 0, 3, 0, 0], "1 + 2 was added up, then dropped"
    sums.hold(1, None)
    sums.add(1, torch.ones(SHAPES[1]))
    assert float(sums.packing.views(sums.taken(len(some)))[1].sum()) == 256
