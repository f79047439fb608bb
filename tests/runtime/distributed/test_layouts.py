"""The layouts themselves, with PyTorch's AdamW as the optimizer: what the other files' comparisons rest on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from .layouts import LAYOUTS, Toy, gradients, local, named, parallel, piece, places_of, whole
from .world import Worlds


def moved(rank: int, size: int, layout: str) -> dict[str, tuple[Tensor, Tensor]]:
    places = places_of(Toy, layout, size)
    parameters = named(parallel(Toy(), layout, size))
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
    given = gradients({name: p.shape for name, p in parameters.items()}, 0)
    for name, p in parameters.items():
        p.grad = piece(p, places[name], given[name])
    optimizer.step()
    return {name: (places[name], local(p)) for name, p in parameters.items()}


@pytest.mark.parametrize("layout", LAYOUTS[4])
def test_every_element_gets_its_gradient(worlds: Worlds, layout: str) -> None:
    model = Toy()
    for name, gradient in gradients({name: p.shape for name, p in model.named_parameters()}, 0).items():
        model.get_parameter(name).grad = gradient
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    found = whole({name: p.shape for name, p in model.named_parameters()}, worlds(4).run(moved, layout))
    for name, values in found:
        assert torch.equal(values, model.get_parameter(name)), name
