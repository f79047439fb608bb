"""Steps from given gradients, in a world and in one process, for tests that compare both to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from dmuon_tune.runtime import Muon

from .layouts import DEDICATE_OPTIONS, OPTIONS, Toy, Vectors, gradients, held, named, parallel, piece, places_of, whole
from .world import World

Held = dict[str, tuple[Tensor, Tensor]]  # by parameter: the places of a rank's elements, and their values


@dataclass(frozen=True)
class Steps:
    """What a run does: ``frozen`` parameters need no gradient; those in ``skipped`` have none at these steps."""

    make: Callable[[], nn.Module] = Toy
    steps: int = 3
    dtype: torch.dtype = torch.float32
    options: Mapping[str, Any] = field(default_factory=dict)
    frozen: Sequence[str] = ()
    skipped: Mapping[str, Sequence[int]] = field(default_factory=dict)
    scheduled: bool = False

    def model(self) -> nn.Module:
        model = self.make().to(self.dtype)
        for name in self.frozen:
            model.get_parameter(name).requires_grad_(False)
        return model

    def optimizer(self, model: nn.Module) -> Muon:
        if self.make is Vectors:
            return Muon([{"params": [p], "scale": "moonlight"} for p in model.parameters()], **self.options)
        return Muon(model, **OPTIONS | dict(self.options))

    def dedicating(self, layout: str) -> dict[str, Any]:
        """The options that owners are chosen by too, where a layout has some."""
        shared = DEDICATE_OPTIONS & self.options.keys() if layout.startswith("dedicated") else ()
        return {name: self.options[name] for name in shared}

    def shapes(self) -> dict[str, torch.Size]:
        return {name: p.shape for name, p in self.make().named_parameters()}

    def run(self, optimizer: Muon, parameters: Mapping[str, nn.Parameter], of: Callable[[str, Tensor], Tensor],
            first: int = 0) -> None:
        """``steps`` steps from ``first`` on; ``of``: what this rank holds of a parameter's gradient."""
        schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step % 4)) if self.scheduled else None
        for step in range(first, first + self.steps):
            for name, gradient in gradients(self.shapes(), step).items():
                p = parameters[name]
                given = p.requires_grad and step not in self.skipped.get(name, ())
                p.grad = of(name, gradient.to(self.dtype)) if given else None
            optimizer.step()
            if schedule is not None:
                schedule.step()


def moved(rank: int, size: int, layout: str, plan: Steps) -> Held:
    """The weights after a run in a world."""
    places = places_of(plan.make, layout, size)
    model = parallel(plan.model(), layout, size, **plan.dedicating(layout))
    parameters = named(model)
    plan.run(plan.optimizer(model), parameters, lambda name, full: piece(parameters[name], places[name], full))
    return held(parameters, places)


def alone(plan: Steps) -> dict[str, Tensor]:
    """The weights after the same run in this process."""
    model = plan.model()
    parameters = named(model)
    plan.run(plan.optimizer(model), parameters, lambda _, full: full)
    return {name: p.detach() for name, p in parameters.items()}


def of_adamw(optimizer: Muon, parameters: Mapping[str, nn.Parameter]) -> set[str]:
    """The names of those parameters that are AdamW's."""
    theirs = {p for group in optimizer.param_groups if not group["use_muon"] for p in group["params"]}
    return {name for name, p in parameters.items() if p in theirs}


def difference(found: Tensor, wanted: Tensor, adamw: bool) -> str | None:
    """None where weights are equal: to the bit, or in bf16 and of AdamW to a rounding.

    On a CPU PyTorch multiplies and adds with one rounding in whole vectors and with two at a tensor's end, in its fused
    AdamW and in bf16's additions, and each shard has an end.
    """
    if torch.equal(found, wanted):
        return None
    eps = torch.finfo(wanted.dtype).eps
    rounded = adamw or wanted.dtype == torch.bfloat16
    if rounded and torch.allclose(found, wanted, rtol=2 * eps, atol=OPTIONS["lr"] * eps):
        return None
    return f"{int((found != wanted).sum())} elements differ, by {float((found - wanted).abs().max()):.3g} at most"


def assert_equal(plan: Steps, ranks: Sequence[Held], wanted: Mapping[str, Tensor], where: str) -> None:
    """Equal on every rank that holds an element."""
    model = plan.model()
    adamw = of_adamw(plan.optimizer(model), named(model))
    shapes = plan.shapes()
    reasons = {name: difference(full, wanted[name], name in adamw) for name, full in whole(shapes, ranks)}
    wrong = [f"{name} {tuple(shapes[name])}: {reason}" for name, reason in reasons.items() if reason]
    assert not wrong, f"{where}, {plan}\n" + "\n".join(wrong)


def assert_as_alone(world: World, layout: str, plan: Steps, wanted: Mapping[str, Tensor] | None = None) -> None:
    assert_equal(plan, world.run(moved, layout, plan), wanted or alone(plan), f"{layout} on {world.size}")
