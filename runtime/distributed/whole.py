"""Parameters that one rank, their owner, keeps whole and the others not at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from dmuon_tune.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..ownership import Assignment
    from .early import Early

ATTRIBUTE = "_dmuon_tune_whole"  # of the parameter


class Keeper(Protocol):
    """The model that such parameters are part of; ``assignment``: of these, in its order; ``step``: the one that
    its passes are for, from 1; ``early``: what an optimizer has begun, or waits to begin, of it."""

    assignment: Assignment
    step: int
    early: Early | None

    def release(self) -> None:
        """Owners' weights are about to change: what modules have been given of them is void, and what has begun of a
        step that is not this one is undone."""
        ...

    def set_reduces(self, now: bool) -> bool:
        """Whether a backward ends with gradients summed over the ranks; returns what was so before."""
        ...

    def unreduced(self) -> str | None:
        """The name of a parameter whose gradient is not summed over the ranks yet; first ends what an exception has
        broken off."""
        ...

    def spread(self, whole: Whole, value: Tensor) -> Tensor:
        """What the owner has of a parameter, its weight or momentum, as a checkpoint has it; collective. Elsewhere the
        value has no row."""
        ...

    def collect(self, whole: Whole, value: Tensor) -> Tensor | None:
        """The reverse: the owner's tensor, None elsewhere; collective."""
        ...


@dataclass(eq=False)
class Whole:
    """Parameter ``name`` is ``owner``'s, a rank of ``group``. ``weight`` is what this rank keeps of it: there all of
    it, elsewhere no row. ``mark`` is what its ``.grad`` is where the gradient itself is on the owner: zeros without
    memory. ``updated``: a place in a stream behind which the weight is as the last step left it."""

    name: str
    owner: int
    group: ProcessGroup
    weight: Tensor
    mark: Tensor
    keeper: Keeper
    is_here: bool
    updated: torch.cuda.Event | None = None


def whole_of(tensor: Tensor) -> Whole | None:
    """What is known of a parameter that has an owner; None for all other tensors."""
    found: Whole | None = getattr(tensor, ATTRIBUTE, None)
    return found


def weight_of(p: Tensor) -> Tensor:
    """What this rank keeps of a parameter that has an owner; any other one itself."""
    whole = whole_of(p)
    return p if whole is None else whole.weight


def is_elsewhere(p: Tensor) -> bool:
    """Whether its weight and gradient are another rank's."""
    whole = whole_of(p)
    return whole is not None and not whole.is_here


def keepers_of(parameters: Iterable[Tensor]) -> list[Keeper]:
    """The models of which some of these are kept whole."""
    wholes = map(whole_of, parameters)
    return list(dict.fromkeys(whole.keeper for whole in wholes if whole is not None))


def check_reduced(keepers: Iterable[Keeper]) -> None:
    """UsageError where a gradient is not summed over the ranks."""
    for keeper in keepers:
        name = keeper.unreduced()
        if name is not None:
            raise UsageError(
                f"{name}: its gradient was added up in no_sync alone; run a step's last backward outside, and after an "
                "exception all of them anew, from zero_grad"
            )
