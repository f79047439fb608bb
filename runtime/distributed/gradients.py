"""What gradient a parameter has, as a number that ranks compare, and what is done where it is not as it should be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon_tune.errors import UsageError

from .pieces import local_of
from .whole import whole_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NO_GRADIENT = 0  # as a code; of a gradient: 1 + 2 · dtype + whether it is placed otherwise than its parameter

_DTYPE, _LAYOUT, _SPEC = map(attrgetter, ("dtype", "layout", "_spec"))


class Gradients:
    """The ``codes`` of the parameters' gradients, and whether they :func:`are_usual`, for as long as others are alike;
    ``local`` is what lies here of them. UsageError where one is none of its parameter's."""

    def __init__(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], local: Sequence[Tensor | None],
        usual: bool,
    ) -> None:
        self.codes, self.are_usual = bytes(map(code_of, parameters, gradients)), usual
        self._types = list(map(type, gradients))
        self._given = [gradient is not None for gradient in gradients]
        self._sharded = [isinstance(gradient, DTensor) for gradient in gradients]
        self._columns = self._read(gradients, local)

    def are_alike(self, gradients: Sequence[Tensor | None], local: Sequence[Tensor | None]) -> bool:
        """Whether gradients of the same parameters are of the same kinds as these."""
        return list(map(type, gradients)) == self._types and self._read(gradients, local) == self._columns

    def _read(self, gradients: Sequence[Tensor | None], local: Sequence[Tensor | None]) -> list[list[Any]]:
        given = list(compress(local, self._given))
        # The same object for every gradient that FSDP2 makes of a parameter.
        specs = map(_SPEC, compress(gradients, self._sharded))
        return [list(map(_DTYPE, given)), list(map(_LAYOUT, given)), list(specs)]


def are_usual(weights: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> bool:
    """Whether what lies here of parameters that have a gradient is contiguous, and the gradient as strides say."""
    return all(weight.is_contiguous() and gradient.layout == torch.strided
               for weight, gradient in zip(weights, gradients, strict=True) if gradient is not None)


def code_of(p: Tensor, gradient: Any) -> int:
    """A gradient's code, below 256; UsageError where it is none of this parameter's."""
    if gradient is None:
        return NO_GRADIENT
    if gradient.dtype not in DTYPES:
        raise UsageError(f"gradients of {gradient.dtype} cannot be used; choose one of {DTYPES}")
    code = 1 + 2 * DTYPES.index(gradient.dtype)
    if not isinstance(p, DTensor):
        return code
    if not isinstance(gradient, DTensor) or gradient.device_mesh != p.device_mesh:
        raise UsageError("a gradient of a DTensor must be a DTensor on the same mesh")
    return code + (gradient.placements != p.placements)


def dtype_of(code: int) -> torch.dtype:
    """That of the gradient of this code; without one any."""
    return DTYPES[(code - 1) // 2]


def disagreement(p: Tensor, indivisible: bool, least: int, most: int) -> str | None:
    """Why a gradient cannot be used whose codes on the ranks are from ``least`` to ``most``; the same on all ranks.

    ``indivisible``: some element of the parameter lies on several ranks, or all of it on one.
    """
    if least == most:
        return None
    if least != NO_GRADIENT:
        return "its gradient has another dtype or other placements on some ranks"
    if indivisible or not most % 2 or dtype_of(most) != p.dtype:
        instead = (
            "average it over the replicas first, as DistributedDataParallel does with find_unused_parameters=True"
            if whole_of(p) is None else "call zero_grad on all ranks alike"
        )
        return f"it has a gradient on some ranks only, and none that can be taken for 0 on the others; {instead}"
    return None


def complete(parameters: Sequence[Tensor], gradients: list[Tensor | None], codes: bytes) -> None:
    """Give every parameter that has a gradient somewhere one that is placed like itself; collective.

    A shard without gradient counts as 0. ``gradients``: what this rank holds of them.
    """
    for place, (p, code) in enumerate(zip(parameters, codes, strict=True)):
        if code % 2 and gradients[place] is not None:
            continue
        if code and p.grad is None:
            p.grad = torch.zeros_like(p)
        if code and not code % 2:  # such as the partial sums of sequence parallelism
            assert isinstance(p, DTensor) and isinstance(p.grad, DTensor)
            p.grad = p.grad.redistribute(placements=p.placements)
        if code:
            gradients[place] = None if p.grad is None else local_of(p.grad)
