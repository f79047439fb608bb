"""A step that remembers how all lay at the one before notices what has changed since, as one that remembers nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dmuon_tune.runtime import Muon

from .reference import gaussian

Change = Callable[[list[nn.Parameter], Muon], None]


def made(steps: int = 3, **options: Any) -> tuple[list[nn.Parameter], Muon]:
    """Matrices of two shapes and a vector, after so many steps: from the third on one finds all as it was."""
    params = [nn.Parameter(gaussian(*shape)) for shape in ((6, 10), (8, 8), (6, 10), (8, 8), (10,))]
    optimizer = Muon([{"params": params[:4]}, {"params": params[4:], "use_muon": False}], **options)
    for _ in range(steps):
        graded(params)
        optimizer.step()
    return params, optimizer


def graded(params: list[nn.Parameter]) -> None:
    for place, p in enumerate(params):
        p.grad = gaussian(*p.shape, seed=place).to(p.dtype)


def momentum(params: list[nn.Parameter], optimizer: Muon) -> Tensor:
    buffer: Tensor = optimizer.state[params[0]]["momentum_buffer"]
    return buffer


def swapped(params: list[nn.Parameter], optimizer: Muon) -> None:
    one, other = (optimizer.state[params[place]] for place in (0, 2))
    one["momentum_buffer"], other["momentum_buffer"] = other["momentum_buffer"], one["momentum_buffer"]


def shortened(buffer: Tensor) -> None:
    with torch.no_grad():
        buffer.set_(buffer.untyped_storage(), 0, (5, 10), (10, 1))


def set_data(p: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    p.data = change(p.data)


CHANGES: dict[str, Change] = {
    "nothing": lambda params, optimizer: None,
    "a parameter lies elsewhere": lambda params, _: set_data(params[0], torch.clone),
    "a parameter lies transposed": lambda params, _: set_data(params[1], lambda data: data.mT),
    "a parameter has lost rows": lambda params, _: set_data(params[0], lambda data: data[:4]),
    "a parameter is of another dtype": lambda params, _: set_data(params[0], Tensor.double),
    "all parameters are of another dtype": lambda params, _: [set_data(p, Tensor.double) for p in params] and None,
    "a gradient is missing": lambda params, _: setattr(params[0], "grad", None),
    "a gradient is sparse": lambda params, _: setattr(params[0], "grad", params[0].grad.to_sparse()),
    "a gradient lies transposed": lambda params, _: setattr(params[0], "grad", params[0].grad.mT.contiguous().mT),
    "momentum is another tensor": lambda params, optimizer: optimizer.state[params[0]].update(
        momentum_buffer=torch.ones(6, 10)
    ),
    "momentum is another shape's": lambda params, optimizer: optimizer.state[params[0]].update(
        momentum_buffer=torch.ones(10, 6)
    ),
    "momentum lies elsewhere": lambda params, optimizer: set_data(momentum(params, optimizer), torch.clone),
    "momentum lies transposed": lambda params, optimizer: set_data(
        momentum(params, optimizer), lambda data: data.mT.contiguous().mT
    ),
    "momentum is of another dtype": lambda params, optimizer: set_data(momentum(params, optimizer), Tensor.double),
    "momentum is on another device": lambda params, optimizer: optimizer.state[params[0]].update(
        momentum_buffer=torch.ones(6, 10, device="meta")
    ),
    "momentum has lost a row in place": lambda params, optimizer: shortened(momentum(params, optimizer)),
    "momentum has another name": lambda params, optimizer: optimizer.state[params[0]].update(
        other=optimizer.state[params[0]].pop("momentum_buffer")
    ),
    "momentum is another parameter's": swapped,
    "state is gone": lambda params, optimizer: optimizer.state.clear(),
    "state is none": lambda params, optimizer: optimizer.state.update({params[0]: 1}),
    "AdamW's state is of another shape": lambda params, optimizer: optimizer.state[params[4]].update(
        exp_avg=torch.ones(3)
    ),
    "AdamW keeps what it has not": lambda params, optimizer: optimizer.param_groups[1].update(amsgrad=True),
    "another μ": lambda params, optimizer: optimizer.param_groups[0].update(momentum=0.5),
    "another form": lambda params, optimizer: optimizer.param_groups[0].update(momentum_form="ema"),
    "another rate": lambda params, optimizer: optimizer.param_groups[0].update(lr=0.5, weight_decay=0.1),
}


def after(params: list[nn.Parameter], optimizer: Muon) -> tuple[str, list[Tensor]]:
    """What two more steps say, and where they leave the parameters."""
    said = ""
    try:
        optimizer.step()
        optimizer.step()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return said, [p.detach() for p in params]


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("form", ["accumulate", "ema"])
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_between_steps_is_noticed(what: str, form: str, steps: int) -> None:
    params, optimizer = made(steps, momentum_form=form)
    others, fresh = deepcopy((params, optimizer))
    for each, its in ((params, optimizer), (others, fresh)):
        graded(each)
        CHANGES[what](each, its)
    said, moved = after(params, optimizer)
    expected, wanted = after(others, fresh)
    assert said == expected
    for one, other in zip(moved, wanted, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert [str(optimizer.state.get(p)) for p in params] == [str(fresh.state.get(p)) for p in others]


def test_another_parameter_may_be_without_gradient() -> None:
    params, optimizer = made()
    for place in (0, 0, 0, 2):
        others, fresh = deepcopy((params, optimizer))
        for each, its in ((params, optimizer), (others, fresh)):
            graded(each)
            each[place].grad = None
            its.step()
        assert all(torch.equal(one, other) for one, other in zip(params, others, strict=True))


def test_blocks_follow_a_parameter_that_lies_elsewhere() -> None:
    """A split parameter's blocks are views: of its memory of today."""
    params, twins = ([nn.Parameter(gaussian(6, 10))] for _ in range(2))
    optimizer, fresh = (Muon([{"params": each, "split": (2, 4)}]) for each in (params, twins))
    for step in range(4):
        for each in (params, twins):
            graded(each)
        if step == 3:
            set_data(params[0], torch.clone)
        optimizer.step()
        fresh.step()
    assert torch.equal(params[0], twins[0])


def test_gradients_are_not_kept() -> None:
    params, optimizer = made()
    graded(params)
    kept = params[0].grad
    assert kept is not None
    optimizer.step()
    optimizer.zero_grad()
    assert sys.getrefcount(kept) == 2  # this name's and the call's
