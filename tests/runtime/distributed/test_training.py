"""Real training in every layout: at each step weights move as one process moves them by the same average gradient."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dmuon_tune.runtime import Muon, clip_grad_norm_

from .cases import difference, of_adamw
from .layouts import LAYOUTS, OPTIONS, Layer, Toy, local, loss_of, mesh_of, named, parallel, places_of, text
from .world import Worlds

BATCH = 6  # sequences a rank and a micro-batch


class Sometimes(Toy):
    """Its experts take no part where ``idle``."""

    idle = False

    def forward(self, given: Tensor) -> Tensor:
        if not self.idle:
            result: Tensor = super().forward(given)
            return result
        x = self.embedding(given)
        for layer in self.layers:
            x = layer(x)
        return self.head(x + self.lift(self.gate(x)))


def full(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()


def without_reduction(model: nn.Module, held_back: bool) -> contextlib.AbstractContextManager[None]:
    """Gradients stay on their rank during one backward, as accumulation asks."""
    if isinstance(model, DistributedDataParallel):
        return model.no_sync() if held_back else contextlib.nullcontext()
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(not held_back)
    return contextlib.nullcontext()


def trained(rank: int, size: int, layout: str, steps: int, how: str = "plain") -> list[float]:
    """Trains and compares at every step; the losses."""
    make = Sometimes if how == "idle" else Toy
    places, twin = places_of(make, layout, size), make()
    options: dict[str, object] = {}
    if how == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if how == "idle":
        options["find_unused_parameters"] = True
    model = make()
    if how == "checkpointed":
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Layer))
    model = parallel(model, layout, size, **options)
    if how == "compiled":
        model.compile(backend="aot_eager")
    data_rank = mesh_of("tp", size).get_local_rank("shard") if layout == "tp" else rank
    data_size = size // 2 if layout == "tp" else size
    optimizer, single = Muon(model, **OPTIONS), Muon(twin, **OPTIONS)
    adamw = of_adamw(single, named(twin))
    micro = 2 if how == "accumulated" else 1
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        batches = [text(BATCH * data_size, seed=micro * step + part) for part in range(micro)]
        for part, batch in enumerate(batches):
            if how == "idle":
                model.module.idle = rank == step % size
            with without_reduction(model, held_back=part + 1 < micro):
                loss = loss_of(model, batch.chunk(data_size)[data_rank]) / micro
                loss.backward()
        losses.append(float(loss.detach()) * micro)
        if step == 0 and how not in ("mixed", "idle"):
            check_average(model, twin, batches)
        if how == "clipped":
            check_clipping(model, twin)
        parameters, own = named(model), named(twin)
        for name, p in parameters.items():
            name = name.replace("_checkpoint_wrapped_module.", "")
            own[name].grad = full(p.grad)
        optimizer.step()
        single.step()
        for name, p in parameters.items():
            name = name.replace("_checkpoint_wrapped_module.", "")
            reason = difference(local(p), own[name].detach().flatten()[places[name]], name in adamw)
            assert reason is None, f"step {step}: {name}: {reason}"
    return losses


def check_average(model: nn.Module, twin: nn.Module, batches: list[Tensor]) -> None:
    """The layout's gradient is one process's on all ranks' data."""
    twin.zero_grad()
    for batch in batches:
        (loss_of(twin, batch) / len(batches)).backward()
    for p, own in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), own.grad, rtol=1e-4, atol=1e-6)


def check_clipping(model: nn.Module, twin: nn.Module) -> None:
    """Gradients are scaled as PyTorch scales them in one process."""
    for p, own in zip(model.parameters(), twin.parameters(), strict=True):
        own.grad = full(p.grad)
    wanted = nn.utils.clip_grad_norm_(twin.parameters(), 0.3)
    assert wanted > 0.3, "the bound must be one that clips"
    torch.testing.assert_close(clip_grad_norm_(model, 0.3), wanted, rtol=1e-5, atol=0)
    for p, own in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), own.grad, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS[4])
def test_forward_backward_and_step(worlds: Worlds, layout: str) -> None:
    for losses in worlds(4).run(trained, layout, 6):
        assert losses[-1] < losses[0] - 0.1, losses


@pytest.mark.parametrize(("layout", "how"), [
    *((layout, "accumulated") for layout in ("fsdp", "ddp")), *((layout, "mixed") for layout in ("hsdp", "tp")),
    *((layout, "clipped") for layout in ("fsdp", "tp", "ddp")),
    ("fsdp", "checkpointed"), ("fsdp", "compiled"), ("ddp", "idle"),
])
def test_what_training_scripts_do(worlds: Worlds, layout: str, how: str) -> None:
    worlds(4 if layout == "tp" else 2).run(trained, layout, 2, how)
