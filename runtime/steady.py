"""What a step has found of a group's tensors: while the next finds the same, it neither checks nor sorts them anew."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_
from typing import Any, cast

import torch
from torch import Tensor

from .batches import Batch, Kind, Setting
from .blocks import Blocks

Layouts = dict[Tensor, tuple[Any, Blocks | None]]  # how a parameter lies and is read; None: it is one matrix

_GRADIENT, _SHAPE, _DTYPE, _LAYOUT = map(attrgetter, ("grad", "shape", "dtype", "layout"))


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

    Columns, each read by one pass in C: every step asks this of every parameter. A tensor that is the same object, at
    the same address, of the same dtype and strides, is on the same device too. Gradients come and go: they are not
    held, and only asked for what others are sorted and refused by.
    """

    def __init__(self, group: Mapping[str, Any], state: Mapping[Tensor, Any]) -> None:
        self.runs: Runs | None = None  # of a step with ``manner``
        self.manner: tuple[float, bool] | None = None
        gradients = list(map(_GRADIENT, group["params"]))
        self.params: list[Tensor] = [p for p, one in zip(group["params"], gradients, strict=True) if one is not None]
        self._every, self._missing = list(group["params"]), _missing(gradients)
        self._keys, self._states = list(state), list(state.values())
        self._own = [state[p] for p in self.params if p in state]
        self.has_momenta = sum("momentum_buffer" in each for each in self._own) == len(self.params)
        self._amsgrad = group.get("amsgrad")  # which asks for more state
        try:
            self._values = values_of(self._own)
            self._tensors = self.params + [value for value in self._values if isinstance(value, Tensor)]
            self._columns = [list(column) for column in self._read(gradients)]
        except (AttributeError, TypeError, RuntimeError):  # what is no state, or sparse: neither has all of that
            self._columns = []

    def is_so(self, group: Mapping[str, Any], state: Mapping[Tensor, Any]) -> bool:
        """Whether the tensors are still the same and lie as they did."""
        gradients = list(map(_GRADIENT, group["params"]))
        return (
            bool(self._columns)
            and same(group["params"], self._every) and _missing(gradients) == self._missing
            and same(state, self._keys) and same(state.values(), self._states)
            and same(values_of(self._own), self._values)
            and group.get("amsgrad") == self._amsgrad
            and all(list(now) == before for now, before in zip(self._read(gradients), self._columns, strict=True))
        )

    def _read(self, gradients: Sequence[Tensor | None]) -> Iterator[Iterable[Any]]:
        given = [gradient for gradient in gradients if gradient is not None]
        yield chain.from_iterable(self._own)  # what each is called
        yield map(len, self._own)
        yield map(Tensor.data_ptr, self._tensors)
        yield map(Tensor.stride, self._tensors)
        yield map(_DTYPE, self._tensors)
        yield map(_SHAPE, self._tensors)
        yield map(_DTYPE, given)
        yield map(_LAYOUT, given)


def _missing(gradients: Sequence[Tensor | None]) -> list[int]:
    return [place for place, gradient in enumerate(gradients) if gradient is None]


def values_of(states: Iterable[dict[Any, Any]]) -> list[Any]:
    """All that these hold, one after another."""
    return list(chain.from_iterable(map(dict.values, states)))


def same(these: Collection[Any], those: Collection[Any]) -> bool:
    """Whether both are the same objects, in the same order."""
    return len(these) == len(those) and all(map(is_, these, those))


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
    # Pieces of gradients are this step's, and momenta that it has made are not among what the next one compares.
    if found.has_momenta and not any(run.gradients for run in runs.values()):
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
