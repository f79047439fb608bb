"""Weight updates by PyTorch: where no kernel does them in its epilogue, and those that none knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rate:
    """What one matrix moves by: W ← (1 − lr·weight_decay)W − lr·factor·polar; ``factor`` below 0 maximizes.

    ``cautious``: only entries that the update moves towards 0 decay (arXiv 2510.12402).
    """

    lr: float | Tensor
    weight_decay: float
    factor: float
    cautious: bool = False

    @property
    def plain(self) -> bool:
        """Whether (decay, rate) as two numbers says it all."""
        return not isinstance(self.lr, Tensor) and not (self.cautious and self.weight_decay)

    @cached_property
    def numbers(self) -> tuple[float, float]:
        """(decay, rate) of W ← decay·W − rate·polar."""
        assert not isinstance(self.lr, Tensor)
        return 1.0 - self.lr * self.weight_decay, self.lr * self.factor


def learning_rate(given: float | Tensor) -> float | Tensor:
    """A number, or the tensor itself where reading it would wait for a device."""
    return given if isinstance(given, Tensor) and given.device.type != "cpu" else float(given)


def move(weights: Sequence[Tensor], polars: Tensor, rates: Sequence[Rate]) -> None:
    """Update weights by their polar factors, (batch, rows, cols) of the weights' dtype, each at its rate."""
    at: dict[Rate, list[int]] = {}  # hashed by its lr's identity where that is a tensor: none is compared
    for place, rate in enumerate(rates):
        at.setdefault(rate, []).append(place)
    for rate, places in at.items():
        some = [weights[place] for place in places]
        polar = polars if len(places) == len(polars) else torch.stack([polars[place] for place in places])
        old = torch.stack(some)
        new = old * (1 - rate.lr * rate.weight_decay)
        if rate.cautious:
            # Of signs: in fp16 the product of small entries would be 0, and so of either sign.
            new = torch.where(polar.sign() * old.sign() * rate.factor >= 0, new, old)
        new -= polar * (rate.lr * rate.factor)
        torch._foreach_copy_(some, new.unbind())


def move_by_numbers(
    weights: Sequence[Tensor], directions: Sequence[Tensor], rates: Sequence[tuple[float, float]]
) -> None:
    """W ← decay·W − rate·direction."""
    for decay, rate in set(rates):
        at = [place for place, pair in enumerate(rates) if pair == (decay, rate)]
        move_alike([weights[place] for place in at], [directions[place] for place in at], decay, rate)


def move_alike(weights: list[Tensor], directions: list[Tensor], decay: float, rate: float) -> None:
    """The same with one decay and one rate for all."""
    if decay != 1.0:
        torch._foreach_mul_(weights, decay)
    torch._foreach_add_(weights, directions, alpha=-rate)
