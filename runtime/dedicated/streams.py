"""A carrier over NCCL, on streams of its own: computation waits for it by events, and it for computation."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.control import Control
from .grid import Grid
from .unit import Unit

SUMS_UNDER_WAY = 2  # units whose packed gradients are kept for a reduction at a time

# torch 2.13 renames both and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Pair(NamedTuple):
    """Groups of the same ranks: for weights, and for gradients."""

    down: dist.ProcessGroup
    up: dist.ProcessGroup


# A communicator takes memory of the device: all models on the same ranks share those of a group.
_pairs: WeakKeyDictionary[dist.ProcessGroup, _Pair] = WeakKeyDictionary()


class OnStreams:
    """See :class:`dmuon_tune.runtime.dedicated.carrier.Carrier`.

    The memory of weights is the stream's that they come in: it takes it when they are to come, and gives it back behind
    what has read them, so that nothing waits for a whole step.
    """

    def __init__(self, control: Control, grid: Grid, device: torch.device) -> None:
        self._control, self._grid, self._device = control, grid, device
        self._inside = _pair(grid.inside, control.timeout)
        self._across = _pair(grid.across, control.timeout) if grid.across else None
        # As FSDP2's: copies before and after a transfer are not to wait behind products.
        self._down, self._far, self._up = (_stream(device) for _ in range(3))
        self._near: dict[Unit, tuple[Tensor, torch.cuda.Event]] = {}
        self._coming: dict[Unit, torch.cuda.Event] = {}
        self._under_way: deque[_Packed] = deque()

    def follow(self) -> None:
        for stream in (self._down, self._far):
            stream.wait_stream(torch.cuda.current_stream(self._device))

    def approach(self, unit: Unit) -> None:
        if self._across is None or unit in self._near:
            return
        with torch.cuda.stream(self._far):
            section = torch.empty_like(unit.sections[self._grid.place])
            segments = unit.packing.segments(section)
            self._fill(unit, segments[self._grid.node], self._far)
            _gather(section, segments, segments[self._grid.node], self._across.down)
            self._near[unit] = section, self._far.record_event()

    def fetch(self, unit: Unit) -> None:
        self.approach(unit)
        with torch.cuda.stream(self._down):
            unit.allocate()
            own = unit.sections[self._grid.place]
            if unit in self._near:
                own, there = self._near.pop(unit)
                there.wait(self._down)
                own.record_stream(self._down)
            else:
                self._fill(unit, own, self._down)
            _gather(unit.flat, unit.sections, own, self._inside.down)
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
        current, packing = torch.cuda.current_stream(self._device), unit.sums.packing
        while len(self._under_way) >= SUMS_UNDER_WAY:
            self._under_way.popleft().release(current)
        self._up.wait_stream(current)
        with torch.cuda.stream(self._up):
            sections = packing.sections(packed)
            mean = torch.empty_like(sections[self._grid.place])
            _scatter(mean, packed, sections, self._inside.up)
            if self._across is not None:
                segments = packing.segments(mean)
                part, mean = mean, torch.empty_like(segments[self._grid.node])
                _scatter(mean, part, segments, self._across.up)
            kept = _Packed(packed, current, self._up.record_event())
        self._under_way.append(kept)
        return _NcclSum(mean, kept, self._device)

    def spread(self, tensor: Tensor, owner: int, what: str) -> None:
        dist.broadcast(tensor, self._control.ranks[owner], group=self._control.group)

    def _fill(self, unit: Unit, segment: Tensor, stream: torch.cuda.Stream) -> None:
        """Write what this rank owns, once the last step has."""
        for place in unit.own:
            updated = unit.members[place].whole.updated
            if updated is not None:
                updated.wait(stream)
        unit.fill(segment)


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
    def __init__(self, mean: Tensor, packed: _Packed, device: torch.device) -> None:
        self._mean, self._packed, self._device = mean, packed, device

    def is_there(self) -> bool:
        return True

    def mean(self) -> Tensor:
        self._packed.read.wait(torch.cuda.current_stream(self._device))
        return self._mean

    def wait(self) -> Tensor:
        self._packed.release(torch.cuda.current_stream(self._device))
        return self._mean


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def _pair(group: dist.ProcessGroup, timeout: float) -> _Pair:
    if group not in _pairs:
        ranks, seconds = dist.get_process_group_ranks(group), timedelta(seconds=timeout)
        _pairs[group] = _Pair(*(
            dist.new_group(ranks, seconds, "nccl", use_local_synchronization=True, group_desc=f"dmuon_tune {what}")
            for what in ("weights", "gradients")
        ))
    return _pairs[group]


def _gather(flat: Tensor, parts: list[Tensor], own: Tensor, group: dist.ProcessGroup) -> None:
    """Every rank's part of ``flat``; the call for lists copies where all are of one size."""
    if _equal(parts):
        _all_gather(flat, own, group=group)
    else:
        dist.all_gather(parts, own, group=group)


def _scatter(out: Tensor, flat: Tensor, parts: list[Tensor], group: dist.ProcessGroup) -> None:
    """The mean of all ranks' parts to each rank."""
    # NCCL's mean is not to be trusted for one rank, as FSDP2 notes.
    mean = dist.ReduceOp.AVG if len(parts) > 1 else dist.ReduceOp.SUM
    if _equal(parts):
        _reduce_scatter(out, flat, op=mean, group=group)
    else:
        dist.reduce_scatter(out, parts, op=mean, group=group)


def _equal(parts: Sequence[Tensor]) -> bool:
    return len({part.numel() for part in parts}) == 1
