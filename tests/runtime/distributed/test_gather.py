"""Muon on shards against Muon in one process, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dmuon_tune.runtime import Muon

from . import layouts
from .world import Worlds


def case_steps(rank: int, size: int, layout: str, options: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train on given gradients; what this rank holds then, and its traffic."""
    places = layouts.places_of(layouts.Toy, layout, size)
    model = layouts.parallel(layouts.Toy(), layout, size)
    shapes = {name: tuple(p.shape) for name, p in layouts.named(model).items()}
    optimizer = Muon(model, **{**layouts.OPTIONS, **options})
    for step in range(steps):
        full = layouts.gradients(shapes, step)
        for name, p in layouts.named(model).items():
            p.grad = layouts.piece(p, places[name], full[name])
        optimizer.step()
    held = {name: (places[name], layouts.local(p)) for name, p in layouts.named(model).items()}
    matrices = {name.removeprefix("module.") for group in optimizer.param_groups if group["use_muon"]
                for name in group["param_names"]}
    assert optimizer.assignment is not None
    return {"matrices": matrices, "count": len(optimizer.assignment.owner), "held": held,
            "traffic": optimizer.traffic, "shapes": shapes}


def alone(options: dict[str, Any], steps: int) -> dict[str, Tensor]:
    model = layouts.Toy()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    optimizer = Muon(model, **{**layouts.OPTIONS, **options})
    for step in range(steps):
        full = layouts.gradients(shapes, step)
        for name, p in model.named_parameters():
            p.grad = full[name]
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("layout", ["fsdp", "columns", "ddp"])
def test_steps_are_those_of_one_process(worlds: Worlds, layout: str) -> None:
    options = {"bucket_bytes": 20_000}
    want = alone({}, 3)
    found = worlds(2).run(case_steps, layout, options, 3)
    shapes = found[0]["shapes"]
    for name, whole in layouts.whole(shapes, [each["held"] for each in found]):
        if name in found[0]["matrices"]:
            assert torch.equal(whole, want[name]), name
        else:  # PyTorch's fused AdamW rounds the last few elements of a tensor, and so of a shard, otherwise
            torch.testing.assert_close(whole, want[name], rtol=1e-6, atol=1e-9)
    assert sum(each["traffic"].ns_runs for each in found) == 3 * found[0]["count"]
