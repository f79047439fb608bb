"""``early_step(max_norm=)`` clips by the norm of the step before, the same in every layout and in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dmuon_tune.errors import UsageError
from dmuon_tune.runtime import Muon

from .layouts import LAYOUTS, OPTIONS, Toy, gradients, local, named, parallel, piece, places_of
from .world import Worlds

close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-9)  # sums in another order
MAX_NORM = 10.0
SIZES = (1.0, 0.5, 3.0, math.inf, 1.0, 1e-6, 2.0)  # of gradients, by step


def full_of(model: nn.Module, step: int) -> dict[str, Tensor]:
    """One entry has the size, where that is infinite."""
    full = gradients({name: p.shape for name, p in named(model).items()}, step)
    if math.isfinite(SIZES[step]):
        return {name: SIZES[step] * each for name, each in full.items()}
    next(iter(full.values()))[0, 0] = SIZES[step]
    return full


def norm_of(full: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([each.double().norm() for each in full.values()]).norm()


def stepped(model: nn.Module, places: Mapping[str, Tensor], skip_nonfinite: bool) -> None:
    optimizer = Muon(model, skip_nonfinite=skip_nonfinite, **OPTIONS)
    assert optimizer.grad_norm is None
    last: Tensor | None = None
    for step in range(len(SIZES)):
        full = full_of(model, step)
        norm = norm_of(full)
        with optimizer.early_step(max_norm=MAX_NORM):
            for name, p in named(model).items():
                p.grad = piece(p, places[name], full[name])
        by = float(norm if last is None else last)
        last = norm if norm.isfinite() else last
        for name, p in named(model).items():
            assert p.grad is not None
            wanted = full[name].flatten()[places[name]] * min(1.0, MAX_NORM / (by + 1e-6))
            close(local(p.grad), wanted, msg=f"{step} {name}")
        assert optimizer.grad_norm is not None and last is not None
        close(optimizer.grad_norm.double(), last)
        optimizer.step()
    assert optimizer.skipped_steps == skip_nonfinite


def in_layouts(rank: int, size: int) -> None:
    for layout in LAYOUTS[size]:
        stepped(parallel(Toy(), layout, size), places_of(Toy, layout, size), skip_nonfinite=layout == "fsdp")


@pytest.mark.parametrize("size", [2, 4])
def test_every_layout_clips_by_the_norm_of_the_step_before(worlds: Worlds, size: int) -> None:
    worlds(size).run(in_layouts)


def test_one_process_does_too() -> None:
    places = {name: torch.arange(p.numel()).view(p.shape) for name, p in named(Toy()).items()}
    stepped(Toy(), places, skip_nonfinite=True)


def of_one_rank(rank: int, size: int, layout: str) -> list[str]:
    """What is said where one rank has another ``max_norm`` than the others, and where it alone has a norm."""
    said = []
    for max_norm, last in ((1.0 + rank, None), (1.0, torch.tensor(1.0) if rank else None)):
        model = parallel(Toy(), layout, size)
        places, optimizer = places_of(Toy, layout, size), Muon(model, **OPTIONS)
        optimizer.grad_norm = last
        before = {name: local(p) for name, p in named(model).items()}
        with optimizer.early_step(max_norm):
            for name, p in named(model).items():
                p.grad = piece(p, places[name], full_of(model, 0)[name])
        with pytest.raises(UsageError) as refused:
            optimizer.step()
        said.append(str(refused.value))
        assert all(torch.equal(local(p), before[name]) for name, p in named(model).items())
        optimizer.step()  # is not of an early_step
    return said


@pytest.mark.parametrize("layout", ["fsdp", "dedicated"])
def test_ranks_that_clip_otherwise_are_named(worlds: Worlds, layout: str) -> None:
    for max_norm, has in worlds(2).run(of_one_rank, layout):
        assert max_norm == "early_step: max_norm is 2.0 on rank 1 and 1.0 on rank 0; give all ranks the same"
        assert has == "early_step: has grad_norm is True on rank 1 and False on rank 0; give all ranks the same"


@pytest.mark.parametrize("max_norm", [-1.0, math.nan, "1"])
def test_a_wrong_max_norm_is_refused(max_norm: Any) -> None:
    optimizer = Muon(Toy(), **OPTIONS)
    with pytest.raises(UsageError, match="max_norm must be a positive number or inf, not"), \
            optimizer.early_step(max_norm):
        pass


@pytest.mark.parametrize("norm", [1.0, torch.ones(1), torch.tensor(1)], ids=str)
def test_a_wrong_norm_is_refused(norm: Any) -> None:
    optimizer = Muon(Toy(), **OPTIONS)
    with pytest.raises(UsageError, match="grad_norm must be a"):
        optimizer.grad_norm = norm
    assert optimizer.grad_norm is None


def test_a_step_before_gradients_are_clipped_is_refused() -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = Muon(model.parameters())
    before = model.weight.detach().clone()
    with pytest.raises(UsageError, match="clipped when early_step.* ends"), optimizer.early_step(max_norm=1.0):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert optimizer.grad_norm is None and torch.equal(model.weight, before)
    optimizer.step()
    assert not torch.equal(model.weight, before)
