"""``Muon(profile=True)``: ranks share the timing of the model's shapes, and all use the same times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from dmuon_tune.errors import DmuonTuneError
from dmuon_tune.recipe import Group
from dmuon_tune.runtime import Muon
from dmuon_tune.runtime.distributed import placement
from dmuon_tune.runtime.ownership.pricing import DEFAULT_RATES, flops

from .world import Worlds

GROUP = Group(2, 16, 24)  # one of the two for each rank


def optimizer() -> Muon:
    model = nn.Sequential(*(nn.Linear(GROUP.cols, GROUP.rows, bias=False) for _ in range(GROUP.batch)))
    fully_shard(model)
    return Muon(model, profile=True, verbose=False)


def profiled(rank: int, size: int) -> tuple[Any, list[list[int]]]:
    timed: list[list[int]] = []
    own = placement.time_steps

    def seen(groups: Any, device: torch.device, *rest: Any) -> Any:
        timed.append([group.batch for group in groups])
        return own(groups, device, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "time_steps", seen)
        muon = optimizer()
        muon.plan()
    return muon.assignment, timed


def failed(rank: int, size: int) -> str:
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("no kernel image")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(placement, "time_steps", broken)
        try:
            optimizer().plan()
        except (DmuonTuneError, RuntimeError) as error:
            return str(error)
    return ""


def test_ranks_divide_the_timing_and_agree(worlds: Worlds) -> None:
    (first, timed), (second, also) = worlds(2).run(profiled)
    assert first == second and len(first.owner) == GROUP.batch
    assert sorted([*timed[0], *also[0]]) == [1, 2], "each batch size on one rank"
    alone_us = flops(Group(1, GROUP.rows, GROUP.cols)) / DEFAULT_RATES["cpu"]
    assert first.makespan_us > 3 * alone_us, "timed, launches and all; not estimated"


def test_a_rank_that_cannot_time_stops_all_with_its_reason(worlds: Worlds) -> None:
    assert all("no kernel image" in message for message in worlds(2).run(failed))
