"""An independent Muon in float64, written from its definition, and what tests of the optimizer share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dmuon_tune.runtime import COEFFICIENTS

JORDAN = (3.4445, -4.7750, 2.0315)
SCALE: dict[str, Callable[[int, int], float]] = {
    "jordan": lambda out, into: max(1.0, out / into) ** 0.5,
    "moonlight": lambda out, into: 0.2 * max(out, into) ** 0.5,
    "spectral": lambda out, into: (out / into) ** 0.5,
    "none": lambda out, into: 1.0,
}


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def orthogonalized(u: Tensor, name: str = "jordan", steps: int = 5) -> Tensor:
    """Newton–Schulz as the sources write it, on the matrix as stored."""
    known = COEFFICIENTS[name]
    norm = u.norm()
    x = u / (known.norm_factor * norm) if norm else u
    for a, b, c in known.take(steps):
        x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
    return x


def reference(
    weight: Tensor, gradients: Sequence[Tensor], lr: float, mu: float | Sequence[float], nesterov: bool, decay: float,
    scale: str, name: str = "jordan", ema: bool = False, cautious: bool = False, maximize: bool = False, steps: int = 5,
) -> Tensor:
    """Muon in float64 as its definition says, on one matrix; ``mu`` is one number, or one a step."""
    w, m = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    for step, given in enumerate(gradients):
        now = mu if isinstance(mu, float) else mu[step]
        g = -given.double() if maximize else given.double()
        m = now * m + ((1 - now) * g if ema else g)
        u = ((1 - now) * g + now * m if ema else g + now * m) if nesterov else m
        move = lr * SCALE[scale](*weight.shape) * orthogonalized(u, name, steps)
        shrunk = lr * decay * w
        if cautious:
            shrunk = shrunk * (move * w >= 0)
        w = w - shrunk - move
    return w


def run(optimizer: torch.optim.Optimizer, weights: Sequence[nn.Parameter], steps: Sequence[Sequence[Tensor]]) -> None:
    """A step for each set of gradients, one a weight."""
    for gradients in steps:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.to(weight.dtype)
        optimizer.step()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.LayerNorm(24), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 6))


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    x = gaussian(32, 12, seed=seed)
    return ((model(x) - x[:, :6].sin()) ** 2).mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        optimizer.step()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Copies of every parameter and of all of its state."""
    return [
        (p.detach().clone(), {key: copy.deepcopy(value) for key, value in optimizer.state.get(p, {}).items()})
        for p in model.parameters()
    ]


def assert_unchanged(before: list[Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for (p, state), (was, held) in zip(snapshot(model, optimizer), before, strict=True):
        assert torch.equal(p, was) and state.keys() == held.keys()
        for key, value in state.items():
            if isinstance(value, Tensor) and value.device.type == "cpu":
                assert torch.equal(value, held[key]), key
            else:
                assert type(value) is type(held[key]), key


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
