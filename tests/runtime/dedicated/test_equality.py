"""From equal gradients dedicated owners move every weight as one process does, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..distributed.cases import Steps, alone, assert_as_alone
from ..distributed.layouts import Nineteen
from ..distributed.world import Worlds


@pytest.mark.parametrize(("size", "layout"), [
    (1, "dedicated"), (2, "dedicated"), (3, "dedicated"), (4, "dedicated"), (4, "dedicated hsdp"),
])
def test_five_steps(worlds: Worlds, size: int, layout: str) -> None:
    assert_as_alone(worlds(size), layout, Steps(steps=5, scheduled=True))


@pytest.mark.parametrize("options", [
    {"bucket_bytes": 1}, {"momentum_form": "ema", "nesterov": False}, {"cautious": True, "maximize": True},
    {"momentum_dtype": "float64", "scale": "moonlight"}, {"skip_nonfinite": True}, {"lr": torch.tensor(0.05)},
    {"flatten": ("experts.*",)}, {"exclude": ("layers.0.*",)}, {"adamw_lr": 0.0, "coefficients": "jordan", "steps": 3},
], ids=str)
def test_every_option(worlds: Worlds, options: dict[str, Any]) -> None:
    plan = Steps(options=options)
    assert_as_alone(worlds(2), "dedicated", plan, alone(plan))


def test_frozen_parameters_and_steps_without_a_gradient(worlds: Worlds) -> None:
    skipped = {"layers.0.up.weight": (0, 2), "layers.1.qkv.weight": (1,), "head.weight": (1,)}
    plan = Steps(frozen=("layers.0.out.weight", "gate.bias"), skipped=skipped)
    assert_as_alone(worlds(3), "dedicated", plan)
    assert_as_alone(worlds(2), "dedicated", Steps(dtype=torch.bfloat16, steps=2))


def test_fewer_matrices_than_ranks_and_more(worlds: Worlds) -> None:
    plan = Steps(Nineteen, options={"splits": {}})
    assert_as_alone(worlds(3), "dedicated", plan)
