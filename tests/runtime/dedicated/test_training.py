"""Real training: dedicated owners move weights as gathered ones do, whatever a script does between two steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from dmuon_tune.runtime import Muon, clip_grad_norm_, no_sync

from ..distributed.layouts import OPTIONS, Layer, Toy, loss_of, named, parallel, text
from ..distributed.world import Worlds

STEPS = 3
BATCH = 6  # sequences a rank and a micro-batch
Way = Callable[[nn.Module, Muon, list[Tensor], int], None]


class Twice(Toy):
    """Runs its first layer before the others and once more behind them."""

    def forward(self, given: Tensor) -> Tensor:
        x = self.embedding(given)
        for layer in (*self.layers, self.layers[0]):
            x = layer(x)
        return self.head(x + self.lift(self.gate(x + self.experts(x))))


class Backwards(Toy):
    """Runs its layers in another order than they stand."""

    def forward(self, given: Tensor) -> Tensor:
        x = self.embedding(given)
        for layer in reversed(self.layers):
            x = layer(x)
        return self.head(x + self.lift(self.gate(x + self.experts(x))))


class Sometimes(Toy):
    """Its first layer and its experts take no part where ``idle``."""

    idle = False

    def forward(self, given: Tensor) -> Tensor:
        x = self.embedding(given)
        for layer in self.layers[1:] if self.idle else self.layers:
            x = layer(x)
        return self.head(x + self.lift(self.gate(x if self.idle else x + self.experts(x))))


class Reentrant(Toy):
    """Recomputes its layers as checkpoints once did."""

    def forward(self, given: Tensor) -> Tensor:
        x = self.embedding(given)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return self.head(x + self.lift(self.gate(x + self.experts(x))))


def plainly(model: nn.Module, optimizer: Muon, batches: list[Tensor], step: int) -> None:
    for batch in batches:
        (loss_of(model, batch) / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


def held_back(model: nn.Module, optimizer: Muon, batches: list[Tensor], step: int) -> None:
    """Gradients go once a step, at its last micro-batch."""
    for batch in batches[:-1]:
        with without_reduction(model):
            (loss_of(model, batch) / len(batches)).backward()
    (loss_of(model, batches[-1]) / len(batches)).backward()
    optimizer.step()
    model.zero_grad()


@contextlib.contextmanager
def without_reduction(model: nn.Module) -> Iterator[None]:
    if any(not isinstance(p, DTensor) for p in model.parameters()):
        with no_sync(model):
            yield
        return
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def dropped(model: nn.Module, optimizer: Muon, batches: list[Tensor], step: int) -> None:
    """Gradients that a script has thrown away take no part in what follows."""
    loss_of(model, batches[0]).backward()
    optimizer.zero_grad()
    plainly(model, optimizer, batches, step)


def evaluated(model: nn.Module, optimizer: Muon, batches: list[Tensor], step: int) -> None:
    """Without gradients before a forward, and between it and its backward."""
    with torch.no_grad():
        before = loss_of(model, batches[0])
    loss = loss_of(model, batches[0])
    torch.testing.assert_close(loss.detach(), before, rtol=0, atol=0)
    with torch.inference_mode():
        loss_of(model, batches[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def together(model: nn.Module, optimizer: Muon, batches: list[Tensor], step: int) -> None:
    """Two forwards before one backward, which takes both."""
    (loss_of(model, batches[0]) + loss_of(model, batches[1])).backward()
    optimizer.step()
    optimizer.zero_grad()


def clipped(model: nn.Module, optimizer: Muon, batches: list[Tensor], step: int) -> None:
    loss_of(model, batches[0]).backward()
    norm = clip_grad_norm_(model, 0.3)
    assert norm > 0.3, "the bound must be one that clips"
    assert clip_grad_norm_(optimizer, 1e9) <= 0.3001
    assert clip_grad_norm_(model, 1e9, norm_type=float("inf")) > 0
    optimizer.step()
    optimizer.zero_grad()


def frozen(model: nn.Module, optimizer: Muon, batches: list[Tensor], step: int) -> None:
    """Parameters that need no gradient in every second step: all of a unit's, one of another's."""
    for name, p in named(model).items():
        if name.startswith("layers.0.") or name == "layers.1.up.weight":
            p.requires_grad_(step % 2 == 0)
    plainly(model, optimizer, batches, step)


def broken_off(model: nn.Module, optimizer: Muon, batches: list[Tensor], step: int) -> None:
    """A forward that raises in its middle on all ranks."""
    if any(not isinstance(p, DTensor) for p in model.parameters()):
        handle = model.layers[1].up.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, batches[0])
        handle.remove()
    plainly(model, optimizer, batches, step)


def idle_everywhere(model: nn.Module, optimizer: Muon, batches: list[Tensor], step: int) -> None:
    model.idle = step % 2 == 1  # type: ignore[assignment]
    plainly(model, optimizer, batches, step)


MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def made(make: type[Toy], layout: str, size: int, options: dict[str, Any], wrap: str) -> nn.Module:
    """A model in a layout; ``options`` are dedicate's, ``mixed`` among them is for FSDP2 too."""
    model, options = make(), dict(options)
    if wrap == "before":
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Layer))
    mixed = options.pop("mixed", False)
    if not layout.startswith("dedicated"):
        options = {}
    elif mixed:
        options |= MIXED
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(**MIXED)
    model = parallel(model, layout, size, **options)
    if wrap == "after":
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Layer))
    if wrap == "compiled":
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    if wrap == "compiled whole":
        model.compile(backend="aot_eager")
    return model


def trained(rank: int, size: int, layout: str, make: type[Toy], way: Way, options: dict[str, Any], wrap: str) -> float:
    """How far apart weights are, as checkpoints have them, of dedicated and of gathered owners after a few steps."""
    found = []
    for each in (layout, {"dedicated": "fsdp", "dedicated hsdp": "hsdp"}[layout]):
        model = made(make, each, size, options, wrap)
        optimizer = Muon(model, **OPTIONS)
        for step in range(STEPS):
            batches = [text(BATCH * size, seed=2 * step + part).chunk(size)[rank] for part in range(2)]
            way(model, optimizer, batches, step)
        found.append({name: value.to_local() for name, value in model.state_dict().items()})
    ours, theirs = found
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours if ours[name].numel())


@pytest.mark.parametrize(("make", "way"), [
    (Toy, plainly), (Toy, held_back), (Toy, dropped), (Toy, evaluated), (Toy, together), (Toy, frozen),
    (Toy, broken_off), (Sometimes, idle_everywhere), (Twice, plainly), (Backwards, plainly), (Reentrant, plainly),
], ids=lambda given: given.__name__)
def test_two_ranks_move_as_gathered_ones_do_to_the_bit(worlds: Worlds, make: type[Toy], way: Way) -> None:
    assert worlds(2).run(trained, "dedicated", make, way, {}, "") == [0.0, 0.0]


@pytest.mark.parametrize(("options", "wrap"), [
    ({"mixed": True}, ""), ({"reshard_after_forward": False}, ""), ({}, "before"), ({}, "after"), ({}, "compiled"),
    ({}, "compiled whole"),
], ids=str)
def test_what_a_model_may_be_made_of(worlds: Worlds, options: dict[str, Any], wrap: str) -> None:
    assert worlds(2).run(trained, "dedicated", Toy, plainly, options, wrap) == [0.0, 0.0]


@pytest.mark.parametrize(("size", "layout", "way"), [
    (1, "dedicated", plainly), (3, "dedicated", plainly), (4, "dedicated hsdp", plainly), (2, "dedicated", clipped),
])
def test_sums_in_another_order(worlds: Worlds, size: int, layout: str, way: Way) -> None:
    for distance in worlds(size).run(trained, layout, Toy, way, {}, ""):
        assert distance < 2e-5, "a few roundings of gradients, after Newton-Schulz"
