"""Carries weights from their owners and gradients to them: over gloo between CPUs, over NCCL on streams of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.control import Control
from .unit import Unit

SUMS_UNDER_WAY = 2  # units whose packed gradients are kept for a reduction at a time

# torch 2.13 renames both and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# A communicator takes memory of the device: all models on the same ranks share both.
_groups: WeakKeyDictionary[dist.ProcessGroup, tuple[dist.ProcessGroup, ...]] = WeakKeyDictionary()


class Sum(Protocol):
    """A reduction under way."""

    def wait(self) -> Tensor:
        """This rank's segment, the mean over the ranks, once the current stream, or a CPU, has waited for it."""
        ...


class Carrier(Protocol):
    """What goes to all ranks has connections of its own, and what goes to owners too: within each of both all ranks
    call alike, whatever lies between."""

    def follow(self) -> None:
        """What has been launched so far writes to owners' weights."""
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


def carrier_for(control: Control, device: torch.device) -> Carrier:
    return OnStreams(control, device) if device.type == "cuda" else BetweenCpus(control)


class BetweenCpus:
    """One transfer an owner, awaited by the host."""

    def __init__(self, control: Control) -> None:
        group = control.group
        self._down, self._up = Control(group, control.timeout), Control(group, control.timeout)
        self._coming: dict[Unit, list[dist.Work]] = {}

    def follow(self) -> None:
        pass

    def fetch(self, unit: Unit) -> None:
        unit.allocate()
        unit.fill()
        self._coming[unit] = [
            self._down.broadcast(segment, owner, f"weights of {unit.name}")
            for owner, segment in enumerate(unit.segments)
        ]

    def wait(self, unit: Unit) -> None:
        for work in self._coming.pop(unit, ()):
            self._down.wait(work, f"weights of {unit.name}")

    def release(self, unit: Unit) -> None:
        self.wait(unit)
        unit.free()

    def reduce(self, unit: Unit, packed: Tensor) -> _GlooSum:
        segments, what = unit.sums.packing.segments(packed), f"gradients of {unit.name}"
        works = [self._up.sum(segment, owner, what) for owner, segment in enumerate(segments)]
        return _GlooSum(self._up, works, what, segments)

    def spread(self, tensor: Tensor, owner: int, what: str) -> None:
        self._down.wait(self._down.broadcast(tensor, owner, what), what)


class _GlooSum:
    def __init__(self, control: Control, works: list[dist.Work], what: str, segments: Sequence[Tensor]) -> None:
        self._control, self._works, self._what, self._segments = control, works, what, segments

    def wait(self) -> Tensor:
        for work in self._works:
            self._control.wait(work, self._what)
        return self._segments[self._control.rank] / self._control.size  # a copy, without what is other owners'


class OnStreams:
    """Two NCCL groups, each fed from a stream of its own, which the current one waits for by events.

    The memory of weights is the first stream's: it takes it when they are to come, and gives it back behind what has
    read them, so that nothing waits for a whole step.
    """

    def __init__(self, control: Control, device: torch.device) -> None:
        self._rank, self._ranks, self._device = control.rank, control.ranks, device
        if control.group not in _groups:
            timeout = timedelta(seconds=control.timeout)
            _groups[control.group] = tuple(
                dist.new_group(
                    control.ranks, timeout, "nccl", use_local_synchronization=True, group_desc=f"dmuon_tune {what}"
                ) for what in ("weights", "gradients")
            )
        self._down_group, self._up_group = _groups[control.group]
        # As FSDP2's: copies before and after a transfer are not to wait behind products.
        self._down, self._up = (torch.cuda.Stream(device, priority=-1) for _ in range(2))  # type: ignore[no-untyped-call]
        self._coming: dict[Unit, torch.cuda.Event] = {}
        self._under_way: deque[_Packed] = deque()

    def follow(self) -> None:
        self._down.wait_stream(torch.cuda.current_stream(self._device))

    def fetch(self, unit: Unit) -> None:
        with torch.cuda.stream(self._down):
            for place in unit.own:
                updated = unit.members[place].whole.updated
                if updated is not None:
                    updated.wait(self._down)
            unit.allocate()
            unit.fill()
            own = unit.segments[self._rank]
            if _equal(unit.segments):
                _all_gather(unit.flat, own, group=self._down_group)
            else:
                dist.all_gather(unit.segments, own, group=self._down_group)
            self._coming[unit] = self._down.record_event()

    def wait(self, unit: Unit) -> None:
        event = self._coming.pop(unit, None)
        if event is not None:
            event.wait(torch.cuda.current_stream(self._device))

    def release(self, unit: Unit) -> None:
        self.wait(unit)
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        unit.free()

    def reduce(self, unit: Unit, packed: Tensor) -> _NcclSum:
        current, segments = torch.cuda.current_stream(self._device), unit.sums.packing.segments(packed)
        while len(self._under_way) >= SUMS_UNDER_WAY:
            self._under_way.popleft().release(current)
        # NCCL's mean is not to be trusted for one rank, as FSDP2 notes.
        mean = dist.ReduceOp.AVG if len(self._ranks) > 1 else dist.ReduceOp.SUM
        self._up.wait_stream(current)
        with torch.cuda.stream(self._up):
            out = torch.empty_like(segments[self._rank])
            if _equal(segments):
                _reduce_scatter(out, packed, op=mean, group=self._up_group)
            else:
                dist.reduce_scatter(out, segments, op=mean, group=self._up_group)
            kept = _Packed(packed, current, self._up.record_event())
        self._under_way.append(kept)
        return _NcclSum(out, kept, self._device)

    def spread(self, tensor: Tensor, owner: int, what: str) -> None:
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            dist.broadcast(tensor, self._ranks[owner], group=self._down_group)
        torch.cuda.current_stream(self._device).wait_stream(self._down)


@dataclass
class _Packed:
    """Gradients in memory of the stream ``home``, which another one reads until ``read``."""

    tensor: Tensor | None
    home: torch.cuda.Stream
    read: torch.cuda.Event

    def release(self, stream: torch.cuda.Stream) -> None:
        """Give the memory back, and let ``stream`` too wait for what the other one does."""
        for each in (self.home, stream):
            self.read.wait(each)
        self.tensor = None


class _NcclSum:
    def __init__(self, out: Tensor, packed: _Packed, device: torch.device) -> None:
        self._out, self._packed, self._device = out, packed, device

    def wait(self) -> Tensor:
        self._packed.release(torch.cuda.current_stream(self._device))
        return self._out


def _equal(segments: Sequence[Tensor]) -> bool:
    """Whether one call carries them from, or to, a flat buffer; the lists' calls would copy them into another."""
    return len({segment.numel() for segment in segments}) == 1
