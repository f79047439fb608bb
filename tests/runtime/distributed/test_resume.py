"""Checkpoints by torch.distributed.checkpoint: saved in one layout, resumed in another, equal to the bit."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from dmuon_tune.runtime import Muon
from dmuon_tune.runtime.distributed.whole import weight_of

from .cases import Held, Steps, alone, assert_equal
from .layouts import LAYOUTS, held, named, parallel, piece, places_of
from .world import Worlds

BEFORE, AFTER = 2, 2


def start(plan: Steps, layout: str, size: int) -> tuple[nn.Module, Muon, dict[str, nn.Parameter], Mapping[str, Tensor]]:
    places = places_of(plan.make, layout, size)
    model = parallel(plan.model(), layout, size)
    return model, plan.optimizer(model), named(model), places


def step(plan: Steps, optimizer: Muon, parameters: dict[str, nn.Parameter], places: Mapping[str, Tensor], first: int
         ) -> None:
    plan.run(optimizer, parameters, lambda name, full: piece(parameters[name], places[name], full), first)


def saved(rank: int, size: int, layout: str, plan: Steps, folder: str, **options: bool) -> None:
    model, optimizer, parameters, places = start(plan, layout, size)
    step(plan, optimizer, parameters, places, 0)
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: Muon, folder: str, no_dist: bool = False, **options: bool) -> None:
    with torch.no_grad():
        for p in model.parameters():
            weight_of(p).zero_()  # so that what is not restored shows
    how = StateDictOptions(**options)
    weights, state = get_state_dict(model, optimizer, options=how)
    restored: dict[str, Any] = {"model": weights, "optimizer": state}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)  # a parameter without a gradient so far has no state
    dcp.load(restored, checkpoint_id=folder, no_dist=no_dist, planner=planner)
    set_state_dict(model, optimizer, model_state_dict=restored["model"], optim_state_dict=restored["optimizer"],
                   options=how)


def resumed(rank: int, size: int, layout: str, plan: Steps, folder: str, options: dict[str, bool]) -> Held:
    model, optimizer, parameters, places = start(plan, layout, size)
    load(model, optimizer, folder, **options)
    step(plan, optimizer, parameters, places, BEFORE)
    return held(parameters, places)


def reloaded(rank: int, size: int, layout: str, plan: Steps, through: str) -> Held:
    """Through the optimizer's own state dict, in the same world: as it is, in a file a rank, or gathered whole."""
    model, optimizer, parameters, places = start(plan, layout, size)
    step(plan, optimizer, parameters, places, 0)
    other, restored, others, _ = start(plan, layout, size)
    with torch.no_grad():
        for name, p in others.items():
            weight_of(p).copy_(weight_of(parameters[name]))
    if through == "whole":
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_optimizer_state_dict(model, optimizer, options=options)
        whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_optimizer_state_dict(other, restored, state if rank == 0 else {}, options=whole)
    else:
        own = optimizer.state_dict()
        if through == "file":
            torch.save(own, file := io.BytesIO())
            file.seek(0)
            own = torch.load(file, weights_only=False)
        restored.load_state_dict(own)
    step(plan, restored, others, places, BEFORE)
    return held(others, places)


def plans(plan: Steps) -> tuple[Steps, Steps, dict[str, Tensor]]:
    """Before a checkpoint, after it, and the weights without one."""
    before, after, all_of_it = (replace(plan, steps=count) for count in (BEFORE, AFTER, BEFORE + AFTER))
    return before, after, alone(all_of_it)


def check_others_go_on(worlds: Worlds, tmp_path: Path, size: int, layout: str, others: Any) -> None:
    """What ``size`` ranks have saved goes on on each of the ``others``, (ranks, layout)."""
    before, after, wanted = plans(Steps(options={"momentum_form": "ema"}))
    worlds(size).run(saved, layout, before, str(tmp_path))
    for other_size, other in others:
        ranks = worlds(other_size).run(resumed, other, after, str(tmp_path), {})
        assert_equal(after, ranks, wanted, f"{layout} on {size}, then {other} on {other_size}")


def check_one_process_goes_on_and_back(worlds: Worlds, tmp_path: Path, size: int, layout: str, back: str) -> None:
    """What ``size`` ranks have saved goes on in one process, and what that has saved on two ranks."""
    before, after, wanted = plans(Steps())
    worlds(size).run(saved, layout, before, str(tmp_path / "world"))
    model = after.model()
    optimizer = after.optimizer(model)
    load(model, optimizer, str(tmp_path / "world"), no_dist=True)
    after.run(optimizer, named(model), lambda _, full: full, BEFORE)
    found = {name: (torch.arange(p.numel()).view(p.shape), p.detach()) for name, p in named(model).items()}
    assert_equal(after, [found], wanted, f"{layout} on {size}, then one process")

    single = before.model()
    first = before.optimizer(single)
    before.run(first, named(single), lambda _, full: full)
    weights, state = get_state_dict(single, first)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(tmp_path / "single"), no_dist=True)
    ranks = worlds(2).run(resumed, back, after, str(tmp_path / "single"), {})
    assert_equal(after, ranks, wanted, f"one process, then {back} on 2")


@pytest.mark.parametrize(("size", "layout", "others"), [
    (4, "fsdp", [(2, "fsdp"), (1, "fsdp"), (4, "hsdp"), (3, "ddp")]),
    (4, "hsdp", [(4, "fsdp"), (2, "tp")]),
    (4, "tp", [(2, "fsdp"), (4, "tp")]),
    (2, "ddp", [(3, "fsdp"), (1, "ddp")]),
])
def test_another_world_goes_on(worlds: Worlds, tmp_path: Path, size: int, layout: str, others: Any) -> None:
    check_others_go_on(worlds, tmp_path, size, layout, others)


def test_one_process_goes_on_and_back(worlds: Worlds, tmp_path: Path) -> None:
    check_one_process_goes_on_and_back(worlds, tmp_path, 4, "tp", "fsdp")


@pytest.mark.parametrize(("layout", "through"), [
    *((layout, "itself") for layout in LAYOUTS[4]), ("tp", "file"), ("hsdp", "whole"), ("ddp", "whole"),
])
def test_a_state_dict_restores_it(worlds: Worlds, layout: str, through: str) -> None:
    before = Steps(steps=BEFORE)
    wanted = alone(Steps(steps=2 * BEFORE))
    assert_equal(before, worlds(4).run(reloaded, layout, before, through), wanted, layout)


def test_a_parameter_that_has_no_momentum_yet_and_another_dtype(worlds: Worlds, tmp_path: Path) -> None:
    later = {"layers.0.up.weight": range(BEFORE), "experts.into": range(BEFORE + AFTER)}
    plan = Steps(frozen=("layers.0.out.weight",), skipped=later, dtype=torch.bfloat16,
                 options={"momentum_dtype": "float32"})
    before, after, wanted = plans(plan)
    worlds(2).run(saved, "fsdp", before, str(tmp_path))
    ranks = worlds(3).run(resumed, "fsdp", after, str(tmp_path), {"flatten_optimizer_state_dict": False})
    assert_equal(after, ranks, wanted, "fsdp on 2, then on 3")


def test_a_file_holds_shards_of_momentum_under_the_parameters_name(worlds: Worlds, tmp_path: Path) -> None:
    plan = Steps(steps=1)
    worlds(4).run(saved, "fsdp", plan, str(tmp_path / "world"))
    worlds(1).run(saved, "ddp", plan, str(tmp_path / "one"))
    readers = [dcp.FileSystemReader(tmp_path / name) for name in ("world", "one")]
    found, one = (reader.read_metadata().state_dict_metadata for reader in readers)
    assert found.keys() == one.keys(), "the same whatever the world"
    momentum = found["optimizer.state.layers.1.up.weight.momentum_buffer"]
    assert momentum.size == (2304, 18) and [tuple(chunk.sizes) for chunk in momentum.chunks] == [(576, 18)] * 4
