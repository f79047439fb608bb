"""What carries weights from their owners and gradients to them, beside computation."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..distributed.control import Control
from .grid import Grid
from .unit import Unit


class Sum(Protocol):
    """A reduction under way."""

    def is_there(self) -> bool:
        """Whether the host need not wait for it: it has come to its end, or streams wait for that."""
        ...

    def mean(self) -> Tensor:
        """As :meth:`wait`, before that."""
        ...

    def wait(self) -> Tensor:
        """This rank's segment, the mean over the ranks, once the current stream, or a CPU, has waited for it."""
        ...


class Carrier(Protocol):
    """What goes to all ranks has connections of its own, and what goes to owners too: within each of both all ranks
    call alike, whatever lies between. Between nodes and inside them are others again."""

    def follow(self) -> None:
        """What has been launched so far writes to owners' weights."""
        ...

    def approach(self, unit: Unit) -> None:
        """Let a unit's weights come to this node, each to its owner's place, unless they have."""
        ...

    def fetch(self, unit: Unit) -> None:
        """Let a unit's weights come."""
        ...

    def wait(self, unit: Unit) -> None:
        """Until they are there; on a GPU the current stream waits."""
        ...

    def release(self, unit: Unit) -> None:
        """Free their memory once what was launched before has read them."""
        ...

    def reduce(self, unit: Unit, packed: Tensor) -> Sum:
        """The mean of all ranks' packed gradients to the owners; ``packed`` is given away."""
        ...

    def spread(self, tensor: Tensor, owner: int, what: str) -> None:
        """An owner's tensor to all, now."""
        ...


def carrier_for(control: Control, grid: Grid, device: torch.device) -> Carrier:
    if device.type == "cuda":
        from .streams import OnStreams

        return OnStreams(control, grid, device)
    from .cpus import BetweenCpus

    return BetweenCpus(control, grid)
