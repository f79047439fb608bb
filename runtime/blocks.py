"""The matrices inside a parameter: itself, a batch of experts, a flattened convolution, or its declared blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmuon_tune.errors import UsageError
from dmuon_tune.words import shown

from .distributed.whole import whole_of

AXES = ("rows", "columns")


class Split(NamedTuple):
    """A parameter that is several matrices stored as one: ``sizes`` along its rows (``dim`` 0) or columns (1).

    Fused QKV of a model whose heads are 64 wide: ``Split((768, 256, 256))``, or per head ``Split((64,) * 20)``.
    """

    sizes: tuple[int, ...]
    dim: int = 0


@dataclass(frozen=True)
class Blocks:
    """How the matrices of one parameter lie in it; made once, as its shape does not change.

    ``order``: its dimensions as flattened into a matrix, rows first (empty: not flattened). ``sizes`` along ``dim``
    (−2 or −1): where it is cut (empty: not at all).
    """

    order: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    dim: int = -2

    def of(self, tensor: Tensor) -> list[Tensor]:
        """The matrices of a tensor of the parameter's shape: views of its memory.

        A tensor to be flattened that lies otherwise than the parameter is copied.
        """
        if self.order:
            tensor = tensor.permute(self.order).reshape(tensor.shape[0], -1)
        parts = torch.split(tensor, list(self.sizes), self.dim) if self.sizes else (tensor,)
        return [matrix for part in parts for matrix in (part.unbind() if part.ndim == 3 else (part,))]

    def shapes(self, p: Tensor) -> list[tuple[int, int]]:
        """(rows, cols) of the matrices, in the order of :meth:`of`."""
        rows, cols = _extents(p, bool(self.order))
        count = p.shape[0] if p.ndim == 3 and not self.order else 1
        cut = [(size, cols) if self.dim == -2 else (rows, size) for size in self.sizes] or [(rows, cols)]
        return [shape for shape in cut for _ in range(count)]


def blocks_of(p: Tensor, group: dict[str, Any], name: str) -> Blocks:
    """How a parameter of this group is to be read; UsageError, by name, where it cannot be."""
    if p.is_complex() or not p.is_floating_point():
        raise UsageError(f"{name}: Muon needs real floating-point weights, not {p.dtype}")
    flattened = group["flatten"] and p.ndim > 2
    if 0 in p.shape or p.ndim < 2 or (p.ndim > 3 and not flattened):
        hint = "flatten it (flatten=True in its group), or " if p.ndim > 3 and 0 not in p.shape else ""
        raise UsageError(
            f"{name}: Muon takes matrices and 3-D batches of them; {hint}put it in a group with use_muon=False"
        )
    order = _order(p, name) if flattened else ()
    sizes, dim = tuple(group["split"]), group["split_dim"]
    extent = _extents(p, flattened)[dim]
    if sizes and sum(sizes) != extent:
        raise UsageError(
            f"{name}: split sizes {shown(list(sizes))} add up to {sum(sizes)}, not to its {extent} {AXES[dim]}"
        )
    return Blocks(order, sizes, dim - 2)


def _extents(p: Tensor, flattened: bool) -> tuple[int, int]:
    return (p.shape[0], prod(p.shape[1:])) if flattened else (p.shape[-2], p.shape[-1])


def _order(p: Tensor, name: str) -> tuple[int, ...]:
    """The dimensions by which a flattened parameter is a view: as they lie in memory, the first one aside.

    A permutation of columns permutes those of the polar factor.
    """
    lies = torch.empty_strided(p.shape, p.stride(), device="meta")  # a DTensor is not to be computed with
    if whole_of(p) is not None:  # contiguous where it is
        lies = torch.empty(p.shape, device="meta")
    strides = lies.stride()
    order = (0, *sorted(range(1, p.ndim), key=lambda dim: -strides[dim]))
    if not lies.permute(order).is_contiguous():
        raise UsageError(f"{name}: it cannot be flattened where it lies; make it contiguous, or leave it to AdamW")
    return order


def check_split(option: str, sizes: Any, dim: Any) -> None:
    """UsageError unless these are sizes of at least 1 along dimension 0 or 1."""
    listed = isinstance(sizes, Sequence) and not isinstance(sizes, str)
    if not listed or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise UsageError(f"{option} must be a sequence of integers of at least 1, not {shown(sizes)}")
    if dim not in (0, 1) or isinstance(dim, bool):
        raise UsageError(f"{option}: dim must be 0 (rows) or 1 (columns), not {shown(dim)}")
