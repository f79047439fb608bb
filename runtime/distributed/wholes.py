"""What an optimizer does with parameters that have an owner: checks them, and brings their momenta to checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon_tune.errors import UsageError

from ..parameters import name_of
from .pieces import Matrix, cut
from .whole import Keeper, keepers_of, whole_of

if TYPE_CHECKING:
    from ..muon import Muon


def checked_keepers(optimizer: Muon) -> list[Keeper]:
    """The models of which some parameters have owners; UsageError, by name, where others are not what they must be."""
    keepers = keepers_of(optimizer._parameters())
    for index, group in enumerate(optimizer.param_groups if keepers else ()):
        for position, p in enumerate(group["params"]):
            whole = whole_of(p)
            if whole is not None and not group["use_muon"]:
                raise UsageError(
                    f"{name_of(group, index, position)} is dedicated, and AdamW's here; give dedicate and Muon the "
                    "same include, exclude and flatten"
                )
            if whole is None and p.requires_grad and not isinstance(p, DTensor):
                raise UsageError(
                    f"{name_of(group, index, position)} is neither dedicated nor sharded; call fully_shard(model, "
                    "ignored_params=dedicated) before the optimizer is made"
                )
    return keepers


def spread(
    optimizer: Muon, matrices: Sequence[Matrix], dtype: torch.dtype | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """(Parameter, momentum as a checkpoint has it) of those that have one; collective. ``matrices``: of all, by place
    among the optimizer's parameters; ``dtype`` is the momenta's (None: the weight's)."""
    for index, p in enumerate(optimizer._parameters()):
        whole, momenta = whole_of(p), optimizer.state.get(p, {}).get("owned")
        if whole is None or momenta is None:
            continue
        value = torch.empty_like(whole.weight, dtype=dtype)
        for matrix in _its(matrices, index) if whole.is_here else ():
            cut(value, matrix.box).copy_(matrix.boxed(momenta[matrix.block]))
        yield p, whole.keeper.spread(whole, value)


def collect(optimizer: Muon, index: int, matrices: Sequence[Matrix], value: Tensor) -> dict[int, Tensor]:
    """The reverse: a parameter's momenta by block on the owner, none elsewhere; collective."""
    whole = whole_of(list(optimizer._parameters())[index])
    assert whole is not None
    full = whole.keeper.collect(whole, value)
    if full is None:
        return {}
    return {matrix.block: matrix.flat(cut(full, matrix.box)).clone() for matrix in _its(matrices, index)}


def _its(matrices: Sequence[Matrix], index: int) -> list[Matrix]:
    return [matrix for matrix in matrices if matrix.parameter == index]
