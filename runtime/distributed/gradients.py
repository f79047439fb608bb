"""What gradient a parameter has, as a number that ranks compare, and what is done where it is not as it should be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon_tune.errors import UsageError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NO_GRADIENT = 0  # as a code; of a gradient: 1 + 2 · dtype + whether it is placed otherwise than its parameter


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


def disagreement(p: Tensor, replicated: bool, least: int, most: int) -> str | None:
    """Why a gradient cannot be used whose codes on the ranks are from ``least`` to ``most``; the same on all ranks.

    ``replicated``: some element of the parameter lies on several ranks.
    """
    if least == most:
        return None
    if least != NO_GRADIENT:
        return "its gradient has another dtype or other placements on some ranks"
    if replicated or not most % 2 or dtype_of(most) != p.dtype:
        return (
            "it has a gradient on some ranks only, and none that can be taken for 0 on the others; average it "
            "over the replicas first, as DistributedDataParallel does with find_unused_parameters=True"
        )
    return None


def complete(parameters: Sequence[Tensor], codes: Sequence[int]) -> None:
    """Give every parameter that has a gradient somewhere one that is placed like itself; collective.

    A shard without gradient counts as 0.
    """
    for p, code in zip(parameters, codes, strict=True):
        if code and p.grad is None:
            p.grad = torch.zeros_like(p)
        if code and not code % 2:  # such as the partial sums of sequence parallelism
            assert isinstance(p, DTensor) and isinstance(p.grad, DTensor)
            p.grad = p.grad.redistribute(placements=p.placements)
