"""What is kept from step to step gives way to what has changed between them: weights are those of one process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from dmuon_tune.errors import DmuonTuneError
from dmuon_tune.runtime import Muon
from dmuon_tune.runtime.distributed.pieces import local_of

from .cases import Held, Steps, assert_equal
from .layouts import local, named, parallel, piece, places_of
from .world import Worlds

Named = Mapping[str, nn.Parameter]
BEFORE = Steps(steps=4)  # by then nothing is made anew any more
AFTER = Steps(steps=3, skipped={"layers.0.up.weight": (5,), "head.weight": (5,)})


def elsewhere(optimizer: Muon, parameters: Named) -> None:
    """As FSDP2 does where it pads anew, and as ``p.data = ...``."""
    for index, p in enumerate(parameters.values()):
        held = getattr(p, "_local_tensor", None)
        if held is not None and index % 2:
            p._local_tensor = held.detach().clone()  # type: ignore[attr-defined]
        else:
            held = p if held is None else held
            held.data = held.data.clone()


def momenta(optimizer: Muon, parameters: Named) -> None:
    """Of Muon's matrices from nothing again, in tensors or in a state of their own."""
    for index, p in enumerate(parameters.values()):
        its = optimizer.state[p]
        if "owned" in its and index % 2:
            its["owned"] = {block: torch.zeros_like(buffer) for block, buffer in its["owned"].items()}
        elif "owned" in its:
            its["owned"].clear()
        elif "momentum_buffer" in its:
            its["momentum_buffer"] = torch.zeros_like(its["momentum_buffer"])


def moments(optimizer: Muon, parameters: Named) -> None:
    """Of AdamW's parameters other ones, or none."""
    for index, p in enumerate(parameters.values()):
        its = optimizer.state[p]
        if "exp_avg" in its and index % 2:
            its["exp_avg"] = its["exp_avg"] / 2
        elif "exp_avg" in its:
            del optimizer.state[p]


def state(optimizer: Muon, parameters: Named) -> None:
    optimizer.state.clear()


def options(optimizer: Muon, parameters: Named) -> None:
    changed = {"lr": 0.3, "weight_decay": 0.2, "momentum": 0.5, "nesterov": False, "momentum_form": "ema"}
    for group in optimizer.param_groups:
        group.update({name: value for name, value in changed.items() if name in group})


def caution(optimizer: Muon, parameters: Named) -> None:
    for group in optimizer.param_groups:
        group.update({"cautious": True, "scale": "moonlight"} if group["use_muon"] else {"amsgrad": False, "eps": 1e-3})


def placements(optimizer: Muon, parameters: Named) -> None:
    """Of the gradients from then on."""


def strides(optimizer: Muon, parameters: Named) -> None:
    """Of the gradients from then on."""


CHANGES = {change.__name__: change for change in (
    elsewhere, momenta, moments, state, options, caution, placements, strides,
)}


def run(optimizer: Muon, parameters: Named, of: Callable[[str, Tensor], Tensor], change: str) -> None:
    def later(name: str, full: Tensor) -> Tensor:
        gradient = of(name, full)
        if change == "placements" and isinstance(gradient, DTensor):
            return gradient.redistribute(placements=[Replicate()])
        held = local_of(gradient)
        if change == "strides" and held.ndim == 2:
            held.set_(held.mT.contiguous().mT)  # type: ignore[call-overload]
        return gradient

    BEFORE.run(optimizer, parameters, of)
    CHANGES[change](optimizer, parameters)
    AFTER.run(optimizer, parameters, later, first=BEFORE.steps)


def changed(rank: int, size: int, layout: str, change: str) -> Held:
    places = places_of(BEFORE.make, layout, size)
    model = parallel(BEFORE.model(), layout, size)
    parameters = named(model)
    run(BEFORE.optimizer(model), parameters, lambda name, full: piece(parameters[name], places[name], full), change)
    return {name: (places[name], local(p)) for name, p in parameters.items()}


def changed_alone(change: str) -> dict[str, Tensor]:
    model = BEFORE.model()
    parameters = named(model)
    run(BEFORE.optimizer(model), parameters, lambda _, full: full, change)
    return {name: p.detach() for name, p in parameters.items()}


@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_seen(worlds: Worlds, layout: str, change: str) -> None:
    assert_equal(BEFORE, worlds(2).run(changed, layout, change), changed_alone(change), f"{layout}, {change}")


def kept(rank: int, size: int) -> list[str]:
    """The parameters whose gradients are still held once the caller has dropped them."""
    model = parallel(BEFORE.model(), "fsdp", size)
    parameters, places = named(model), places_of(BEFORE.make, "fsdp", size)
    optimizer = BEFORE.optimizer(model)
    BEFORE.run(optimizer, parameters, lambda name, full: piece(parameters[name], places[name], full))
    held = {name: weakref.ref(local_of(p.grad)) for name, p in parameters.items() if p.grad is not None}
    optimizer.zero_grad()
    gc.collect()
    return [name for name, reference in held.items() if reference() is not None] if held else ["none were given"]


def test_gradients_are_not_kept(worlds: Worlds) -> None:
    assert worlds(2).run(kept) == [[], []]


def ask_for_more(optimizer: Muon, parameters: Named, rank: int) -> Callable[[], None]:
    group = next(group for group in optimizer.param_groups if not group["use_muon"])
    group["amsgrad"] = True
    return lambda: group.update(amsgrad=False)


def lose_a_moment(optimizer: Muon, parameters: Named, rank: int) -> Callable[[], None]:
    """On one rank alone."""
    its = next(optimizer.state[p] for p in parameters.values() if "exp_avg_sq" in optimizer.state[p])
    lost = {"exp_avg_sq": its.pop("exp_avg_sq")} if rank == 1 else {}
    return lambda: its.update(lost)


BROKEN = {broken.__name__: broken for broken in (ask_for_more, lose_a_moment)}


def mended(rank: int, size: int, layout: str, how: str) -> Held:
    """The weights where a step in between is refused on all ranks."""
    places = places_of(BEFORE.make, layout, size)
    model = parallel(BEFORE.model(), layout, size)
    parameters, optimizer = named(model), BEFORE.optimizer(model)

    def of(name: str, full: Tensor) -> Tensor:
        return piece(parameters[name], places[name], full)

    BEFORE.run(optimizer, parameters, of)
    mend = BROKEN[how](optimizer, parameters, rank)
    with pytest.raises(DmuonTuneError, match="exp_avg_sq must be a real floating-point tensor, not None"):
        optimizer.step()
    mend()
    AFTER.run(optimizer, parameters, of, first=BEFORE.steps)
    return {name: (places[name], local(p)) for name, p in parameters.items()}


@pytest.mark.parametrize("how", BROKEN)
def test_state_that_adamw_cannot_use_is_refused_on_all_ranks_and_can_be_mended(worlds: Worlds, how: str) -> None:
    model = BEFORE.model()
    parameters, optimizer = named(model), BEFORE.optimizer(model)
    BEFORE.run(optimizer, parameters, lambda _, full: full)
    AFTER.run(optimizer, parameters, lambda _, full: full, first=BEFORE.steps)
    alone = {name: p.detach() for name, p in parameters.items()}
    assert_equal(BEFORE, worlds(2).run(mended, "fsdp", how), alone, how)
