"""What one step reads of a group's options, and the equal matrices that it runs together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .scales import SCALES
from .updates import Rate, learning_rate


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

    def kind(self, p: Tensor, gradient_dtype: torch.dtype, rows: int, cols: int) -> Kind:
        return Kind(p.device, p.dtype, gradient_dtype, rows, cols, self._mode, self.mu, self._plain)


@dataclass
class Batch:
    """Equal matrices of one step, one entry each."""

    weights: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    momenta: list[Tensor] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)
