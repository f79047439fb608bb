"""How owners are looked for: options of the search reach it, are the same on all ranks, and limit what one owns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dmuon_tune.errors import DmuonTuneError, UsageError
from dmuon_tune.runtime import Muon, OwnershipOptions, dedicate
from dmuon_tune.runtime.distributed.whole import weight_of

from .layouts import mesh_of
from .world import Worlds

THIN, SQUARE, SMALL = (8, 1024), (128, 128), (8, 64)  # of little work for what they take, and of much; one more
LIMIT = (6 * 8 * 1024 + 2 * 8 * 64) * 4  # bytes: less than eight thin ones have


def made(rows: int, cols: int) -> nn.Parameter:
    p = nn.Parameter(torch.zeros(rows, cols))
    p.grad = torch.ones(rows, cols)
    return p


def optimizer_of(**options: Any) -> Muon:
    parameters = [made(*SQUARE), *(made(*THIN) for _ in range(8))]
    return Muon(parameters, process_group=torch.distributed.group.WORLD, **options)


def owned_bytes(optimizer: Muon) -> int:
    return sum(momentum.nbytes for state in optimizer.state.values() for momentum in state["owned"].values())


def searched(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in {
        "as it is": OwnershipOptions(seconds=0.2), "at once": OwnershipOptions(seconds=0),
        "limited": OwnershipOptions(seconds=0.2, memory_bytes=LIMIT),
    }.items():
        optimizer = optimizer_of(ownership=options)
        optimizer.step()
        assert optimizer.assignment is not None
        found[name] = optimizer.assignment.method, owned_bytes(optimizer)
    layers = nn.ModuleList(nn.Linear(cols, rows, bias=False) for rows, cols in (SQUARE, *[THIN] * 8))
    owned = dedicate(layers, mesh_of("fsdp", size), include=["*"], ownership=options)
    found["dedicated"] = sum(weight_of(p).nbytes for p in owned)  # in fp32 a momentum takes as much
    optimizer.add_param_group({"params": [made(*SMALL) for _ in range(2)]})  # of the limited one
    optimizer.step()
    found["limited, more"] = owned_bytes(optimizer)
    optimizer.add_param_group({"params": [made(*THIN)]})
    for name, other in {
        "other seeds": optimizer_of(ownership=OwnershipOptions(seed=rank)),
        "too little": optimizer_of(ownership=OwnershipOptions(memory_bytes=THIN[0] * THIN[1] * 4)),
        "too much": optimizer,
    }.items():
        with pytest.raises(DmuonTuneError) as raised:
            other.step()
        found[name] = str(raised.value)
    return found


def test_options_of_the_search_reach_it(worlds: Worlds) -> None:
    first, second = worlds(2).run(searched)
    both = {name: (first[name], second[name]) for name in first}
    assert max(nbytes for _, nbytes in both["as it is"]) > LIMIT, "the square one weighs as much as all others"
    assert {method for method, _ in both["at once"]} == {"longest first"}
    assert max(nbytes for _, nbytes in both["limited"]) <= LIMIT and max(both["limited, more"]) <= LIMIT
    assert max(both["dedicated"]) <= LIMIT and sum(both["dedicated"]) == sum(nbytes for _, nbytes in both["limited"])
    assert "ownership.seed is 1 on rank 1 and 0 on rank 0" in both["other seeds"][0] == both["other seeds"][1]
    for name, said in (("too little", "is 65536 bytes, an owner's limit 32768; raise it"), ("too much", "raise it")):
        assert all(said in text for text in both[name]), both[name]


@pytest.mark.parametrize(("options", "said"), [
    ({"seconds": -1}, "ownership.seconds must be a finite number of at least 0, not -1"),
    ({"seed": 0.5}, "ownership.seed must be an integer of at least 0, not 0.5"),
    ({"memory_bytes": 0}, "ownership.memory_bytes must be an integer of at least 1, not 0"),
])
def test_options_that_no_search_can_have(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        OwnershipOptions(**options)
    assert str(raised.value) == said
