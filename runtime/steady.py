"""What a step has found of a group's tensors: while the next finds the same, it neither checks nor sorts them anew."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any, cast

import torch
from torch import Tensor

from .batches import Batch, Kind, Setting
from .blocks import Blocks

Layouts = dict[Tensor, tuple[Any, Blocks | None]]  # how a parameter lies and is read; None: it is one matrix

_SHAPE, _DTYPE, _LAYOUT = attrgetter("shape"), attrgetter("dtype"), attrgetter("layout")


@dataclass
class Run:
    """Equal matrices of one group, one entry each; ``gradients`` where they are not simply the weights' own."""

    weights: list[Tensor] = field(default_factory=list)
    momenta: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)


# By what they share: device, dtype, the gradients' dtype, (rows, cols), whether each is a whole parameter.
Runs = dict[tuple[torch.device, torch.dtype, torch.dtype, torch.Size, bool], Run]


class Found:
    """The parameters of a group that have a gradient, and how they, their gradients and their state lie.

    Columns, each read by one pass in C: this is asked of every parameter at every step. A tensor that is the same
    object, at the same address, of the same dtype and strides, is on the same device too. Gradients come and go: they
    are not held, and only asked for what others are sorted and refused by.
    """

    def __init__(self, group: Mapping[str, Any], state: Mapping[Tensor, Any]) -> None:
        self.params: list[Tensor] = [p for p in group["params"] if p.grad is not None]
        self.runs: Runs | None = None  # of a step with ``manner``
        self.manner: tuple[float, bool] | None = None
        nothing: dict[str, Any] = {}
        states = [state.get(p, nothing) for p in self.params]
        try:
            values = [value for each in states for value in each.values()]
            tensors = self.params + [value for value in values if isinstance(value, Tensor)]
            gradients = [p.grad for p in self.params]
            self._held = [*self.params, *values]
            self._columns = [
                list(map(len, states)), list(map(_SHAPE, self.params)), list(map(Tensor.stride, tensors)),
                list(map(_DTYPE, tensors)), list(map(Tensor.data_ptr, tensors)),
                list(map(_DTYPE, gradients)), list(map(_LAYOUT, gradients)),
            ]
        except (AttributeError, TypeError, RuntimeError):  # what is no state, or sparse: neither has all of that
            self._columns = []

    def is_as(self, before: Found) -> bool:
        """Whether the tensors are the same and all lies as it did."""
        return (
            bool(self._columns)
            and self._columns == before._columns
            and len(self._held) == len(before._held)
            and all(map(is_, self._held, before._held))
        )


def sorted_batches(
    settings: Iterable[Setting], found: Mapping[int, Found], layouts: Layouts, state: dict[Tensor, dict[str, Any]],
    momentum_dtype: torch.dtype | None,
) -> dict[Kind, Batch]:
    """The matrices that have a gradient, by what they must share to run together; ``found`` by the settings' index."""
    batches: dict[Kind, Batch] = defaultdict(Batch)
    for setting in settings:
        runs = _runs(setting, found[setting.index], layouts, state, momentum_dtype)
        for (*_, gradient_dtype, (rows, cols), _), run in runs.items():
            batch = batches[setting.kind(run.weights[0], gradient_dtype, rows, cols)]
            batch.weights += run.weights
            batch.momenta += run.momenta
            batch.gradients += run.gradients or [cast(Tensor, weight.grad) for weight in run.weights]
            batch.rates += [setting.rate(rows, cols)] * len(run.weights)
    return batches


def _runs(
    setting: Setting, found: Found, layouts: Layouts, state: dict[Tensor, dict[str, Any]],
    momentum_dtype: torch.dtype | None,
) -> Runs:
    """A group's matrices, their momentum made or brought to this step's μ."""
    manner = setting.mu, setting.average
    if found.runs is not None and found.manner == manner:
        return found.runs
    runs: Runs = defaultdict(Run)
    for p in found.params:
        blocks, gradient = layouts[p][1], cast(Tensor, p.grad)
        momentum = _momentum(p, state[p], setting, blocks, momentum_dtype)
        if blocks is None:
            run = runs[p.device, p.dtype, gradient.dtype, p.shape, True]
            run.weights.append(p)
            run.momenta.append(momentum)
            continue
        for weight, buffer, piece in zip(*map(blocks.of, (p, momentum, gradient)), strict=True):
            run = runs[p.device, p.dtype, gradient.dtype, weight.shape, False]
            run.weights.append(weight)
            run.momenta.append(buffer)
            run.gradients.append(piece)
    if not any(run.gradients for run in runs.values()):  # those are this step's
        found.runs, found.manner = runs, manner
    return runs


def _momentum(
    p: Tensor, state: dict[str, Any], setting: Setting, blocks: Blocks | None, dtype: torch.dtype | None
) -> Tensor:
    """The parameter's momentum, in the form M ← μM + G: of an average it holds M / (1 − μ)."""
    if "momentum_buffer" not in state:
        lies = torch.preserve_format if blocks and blocks.order else torch.contiguous_format
        state["momentum_buffer"] = torch.zeros_like(p, dtype=dtype, memory_format=lies)
    buffer: Tensor = state["momentum_buffer"]
    if blocks and blocks.order and buffer.stride() != p.stride():  # it must be a view as well
        state["momentum_buffer"] = buffer = torch.empty_like(p, dtype=buffer.dtype).copy_(buffer)
    setting.carry(state, (buffer,))
    return buffer
