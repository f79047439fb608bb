"""What a step costs, counted: each matrix orthogonalized once, sent to its owner once and back once."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from .cases import Steps
from .layouts import CUT, LAYOUTS, Nineteen, named, parallel, piece, places_of
from .world import Worlds

STEPS, ITEM_BYTES = 2, 4


def matrices(optimizer: Any, shapes: dict[Any, tuple[str, tuple[int, ...]]]) -> list[tuple[str, int, int]]:
    """(Parameter, first flat element, last + 1) of each matrix in the optimizer's order; all are rows of parameters."""
    found = []
    for group in optimizer.param_groups:
        for name, shape in (shapes[p] for p in group["params"] if group["use_muon"]):
            cols = shape[-1]
            sizes = CUT if group["split"] else (shape[1],) * shape[0] if len(shape) == 3 else (shape[0],)
            start = 0
            for rows in sizes:
                found.append((name, start * cols, (start + rows) * cols))
                start += rows
    return found


def counted(rank: int, size: int, layout: str, plan: Steps) -> dict[str, Any]:
    places = places_of(plan.make, layout, size)
    model = parallel(plan.model(), layout, size)
    parameters = named(model)
    optimizer = plan.optimizer(model)
    plan.run(optimizer, parameters, lambda name, full: piece(parameters[name], places[name], full))
    held = []
    for name, start, stop in matrices(optimizer, {p: (name, tuple(p.shape)) for name, p in parameters.items()}):
        held.append((stop - start, int(((places[name] >= start) & (places[name] < stop)).sum())))
    again = plan.optimizer(model)
    again.plan()
    return {**asdict(optimizer.traffic), "held": held, "owner": optimizer.assignment.owner,
            "again": again.assignment.owner}


@pytest.mark.parametrize(("size", "bucket_bytes"), [*((size, 2**28) for size in LAYOUTS), (4, 2000)])
def test_every_matrix_once_to_its_owner_and_back(worlds: Worlds, size: int, bucket_bytes: int) -> None:
    plan = Steps(steps=STEPS, options={"bucket_bytes": bucket_bytes})
    for layout in LAYOUTS[size]:
        ranks = worlds(size).run(counted, layout, plan)
        owner = ranks[0]["owner"]
        assert all(rank["owner"] == rank["again"] == owner for rank in ranks), "decided alike, every time"
        assert len(owner) == 18 and sum(rank["ns_runs"] for rank in ranks) == STEPS * len(owner)
        assert [rank["ns_runs"] for rank in ranks] == [STEPS * owner.count(rank) for rank in range(size)]
        assert len({rank["collectives"] for rank in ranks}) == 1
        # By the definition: an element that its owner lacks comes once, and goes to all others that hold it.
        numel = [elements for elements, _ in ranks[0]["held"]]
        held = [[rank["held"][place][1] for rank in ranks] for place in range(len(owner))]
        to_owner = sum(numel[place] - held[place][its] for place, its in enumerate(owner))
        to_holders = sum(sum(held[place]) - held[place][its] for place, its in enumerate(owner))
        want = STEPS * ITEM_BYTES * (to_owner + to_holders)
        assert sum(rank["bytes_sent"] for rank in ranks) == sum(rank["bytes_received"] for rank in ranks) == want
        if layout == "fsdp" and size > 1:
            gathered = STEPS * ITEM_BYTES * (size - 1) * sum(numel)  # by every rank, before each computes all
            assert want == pytest.approx(gathered * 2 / size, rel=0.1)  # exact where shards are even


def test_few_collectives_and_shards_that_are_even(worlds: Worlds) -> None:
    ranks = worlds(4).run(counted, "fsdp", Steps(Nineteen, steps=STEPS))
    assert sum(rank["ns_runs"] for rank in ranks) == 19 * STEPS
    matrices, wide = 18 * 12 * 20, 18 * 2304
    owner = ranks[0]["owner"][0]  # of a module's own parameters before its parts'
    lacking = wide - (5, 5, 5, 3)[owner] * 2304
    want = STEPS * ITEM_BYTES * 2 * (matrices * 3 // 4 + lacking)
    assert sum(rank["bytes_sent"] for rank in ranks) == want
