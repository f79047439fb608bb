"""From equal gradients every layout moves every weight as one process does, to the bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ..reference import reference
from .cases import Steps, alone, assert_as_alone, moved
from .layouts import CUT, LAYOUTS, OPTIONS, Alone, Nineteen, Toy, Vectors, gradients, whole
from .world import Worlds


@pytest.mark.parametrize("size", LAYOUTS)
def test_twenty_steps_in_every_layout(worlds: Worlds, size: int) -> None:
    plan = Steps(steps=20, scheduled=True)
    wanted = alone(plan)
    for layout in LAYOUTS[size]:
        assert_as_alone(worlds(size), layout, plan, wanted)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("make", [Alone, Nineteen, Vectors])
def test_fewer_matrices_than_ranks_and_more(worlds: Worlds, size: int, make: Any) -> None:
    assert_as_alone(worlds(size), "fsdp", Steps(make))


def test_shards_of_columns(worlds: Worlds) -> None:
    assert_as_alone(worlds(2), "columns", Steps())


@pytest.mark.parametrize("options", [
    {"bucket_bytes": 1}, {"momentum_form": "ema", "nesterov": False}, {"cautious": True, "maximize": True},
    {"momentum_dtype": "float64", "scale": "moonlight"}, {"skip_nonfinite": True}, {"lr": torch.tensor(0.05)},
    {"flatten": ("experts.*",)}, {"exclude": ("*",)}, {"adamw_lr": 0.0, "coefficients": "jordan", "steps": 3},
], ids=str)
def test_every_option(worlds: Worlds, options: dict[str, Any]) -> None:
    plan = Steps(options=options)
    wanted = alone(plan)
    assert_as_alone(worlds(2), "fsdp", plan, wanted)
    assert_as_alone(worlds(4), "tp", plan, wanted)


@pytest.mark.parametrize("layout", LAYOUTS[4])
def test_bfloat16_frozen_parameters_and_steps_without_a_gradient(worlds: Worlds, layout: str) -> None:
    skipped = {"layers.0.up.weight": (0, 2), "layers.1.qkv.weight": (1,), "head.weight": (1,)}
    assert_as_alone(worlds(4), layout, Steps(frozen=("layers.0.out.weight", "gate.bias"), skipped=skipped))
    assert_as_alone(worlds(4), layout, Steps(dtype=torch.bfloat16, steps=2))


def test_other_gradients_at_every_step(worlds: Worlds) -> None:
    """As a mixture of experts leaves some without: more sets than the optimizer keeps schedules of, then again."""
    rng = random.Random(0)
    idle = [{f"matrices.{place}" for place in rng.sample(range(18), 9)} for _ in range(12)]
    skipped = {f"matrices.{place}": [step for step in range(15) if f"matrices.{place}" in idle[step % 12]]
               for place in range(18)}
    assert_as_alone(worlds(3), "fsdp", Steps(Nineteen, steps=15, skipped=skipped))


def test_the_definition_in_float64(worlds: Worlds) -> None:
    plan = Steps(steps=4)
    first = {name: p.detach() for name, p in Toy().named_parameters()}
    for name, values in whole(plan.shapes(), worlds(4).run(moved, "hsdp", plan)):
        if "qkv.weight" in name or name.endswith(("out.weight", "up.weight", "down.weight")):
            given = [gradients({name: values.shape}, step)[name] for step in range(plan.steps)]
            parts = CUT if "qkv" in name else (len(values),)
            cut = zip(first[name].split(parts), zip(*(each.split(parts) for each in given), strict=True), strict=True)
            want = torch.cat([reference(weight, steps, OPTIONS["lr"], 0.95, True, OPTIONS["weight_decay"], "jordan",
                                        "polar-express-1.05") for weight, steps in cut])
            torch.testing.assert_close(values.double(), want, rtol=0, atol=2e-6)
