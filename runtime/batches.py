"""What one step reads of a group's options, and the equal matrices that it moves together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .execution import Momentum
from .newton_schulz import GramNewtonSchulz
from .scales import SCALES
from .updates import Rate, learning_rate, move


@dataclass(frozen=True, slots=True)
class Kind:
    """What matrices must share to run together; ``mode`` is momentum's, ``plain``: two numbers are all its rates."""

    device: torch.device
    dtype: torch.dtype
    gradient_dtype: torch.dtype
    rows: int
    cols: int
    mode: str
    mu: float
    plain: bool


class Setting:
    """A Muon group's options as one step reads them."""

    def __init__(self, group: dict[str, Any], index: int) -> None:
        self.group, self.index = group, index
        self.mu, self.average = float(group["momentum"]), group["momentum_form"] == "ema"
        self._mode = "n" if group["nesterov"] else "m"
        self._lr, self._weight_decay = learning_rate(group["lr"]), float(group["weight_decay"])
        self._scale, self._sign = SCALES[group["scale"]], -1.0 if group["maximize"] else 1.0
        self._plain = self.rate(1, 1).plain

    def rate(self, rows: int, cols: int) -> Rate:
        return Rate(self._lr, self._weight_decay, self._sign * self._scale(rows, cols), self.group["cautious"])

    def carry(self, state: dict[str, Any], buffers: Iterable[Tensor]) -> None:
        """Bring a parameter's momentum to this step's μ: of an average the buffers hold M / (1 − μ)."""
        if self.average:
            held = state.get("momentum_mu", self.mu)
            if held != self.mu:
                for buffer in buffers:
                    buffer.mul_((1 - held) / (1 - self.mu))
            state["momentum_mu"] = self.mu
        elif len(state) > 1:
            state.pop("momentum_mu", None)

    @property
    def manner(self) -> tuple[str, float, bool]:
        """What of a :class:`Kind` its options say."""
        return self._mode, self.mu, self._plain

    def kind(self, p: Tensor, gradient_dtype: torch.dtype, rows: int, cols: int) -> Kind:
        return Kind(p.device, p.dtype, gradient_dtype, rows, cols, *self.manner)


@dataclass
class Batch:
    """Equal matrices of one step, one entry each."""

    weights: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    momenta: list[Tensor] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)

    def move(self, newton_schulz: GramNewtonSchulz, kind: Kind) -> None:
        """One step of them, which are all of a kind."""
        momentum, count = Momentum(kind.mode, tuple(self.momenta), kind.mu), len(self.weights)
        if kind.plain:
            newton_schulz.step(self.weights, self.gradients, momentum, [rate.numbers for rate in self.rates])
            return
        polars = torch.zeros(count, kind.rows, kind.cols, dtype=kind.dtype, device=kind.device)
        newton_schulz.step(polars.unbind(), self.gradients, momentum, [(0.0, -1.0)] * count)
        move(self.weights, polars, self.rates)


def are_finite(gradients: Iterable[Tensor]) -> bool:
    """Whether all entries are; waits for the device."""
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        if gradient.numel():
            by_device[gradient.device].append(gradient)
    # The largest entry: unlike the sum of squares it overflows only where an entry has.
    largest = [torch.stack([norm.double() for norm in torch._foreach_norm(some, float("inf"))])
               for some in by_device.values()]
    return all(bool(norms.isfinite().all()) for norms in largest)
