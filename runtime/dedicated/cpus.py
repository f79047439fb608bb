"""A carrier over gloo between CPUs: one transfer an owner, awaited by the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from ..distributed.control import Control
from .grid import Grid
from .unit import Unit

Post = Callable[[Tensor, int, str], dist.Work]


class BetweenCpus:
    """See :class:`dmuon_tune.runtime.dedicated.carrier.Carrier`."""

    def __init__(self, control: Control, grid: Grid) -> None:
        self._control, self._grid = control, grid
        self._inside = _Pair(grid.inside, control)
        self._across = _Pair(grid.across, control) if grid.across else None
        self._near: dict[Unit, tuple[Tensor, _Transfer]] = {}
        self._coming: dict[Unit, _Transfer] = {}

    def follow(self) -> None:
        pass

    def approach(self, unit: Unit) -> None:
        if self._across is not None and unit not in self._near:
            section = unit.flat.new_empty(unit.sections[self._grid.place].shape)
            segments = unit.packing.segments(section)
            unit.fill(segments[self._grid.node])
            down = self._across.down
            self._near[unit] = section, _Transfer(down, down.broadcast, segments, f"weights of {unit.name}")

    def fetch(self, unit: Unit) -> None:
        self.approach(unit)
        unit.allocate()
        if unit in self._near:
            section, transfer = self._near.pop(unit)
            transfer.wait()
            unit.sections[self._grid.place].copy_(section)
        else:
            unit.fill(unit.sections[self._grid.place])
        down = self._inside.down
        self._coming[unit] = _Transfer(down, down.broadcast, unit.sections, f"weights of {unit.name}")

    def wait(self, unit: Unit) -> None:
        if unit in self._coming:
            self._coming.pop(unit).wait()

    def release(self, unit: Unit) -> None:
        self.wait(unit)
        unit.free()

    def reduce(self, unit: Unit, packed: Tensor) -> _GlooSum:
        return _GlooSum(self._inside, self._across, self._grid, unit, packed, self._control.size)

    def spread(self, tensor: Tensor, owner: int, what: str) -> None:
        self._control.wait(self._control.broadcast(tensor, owner, what), what)


class _Pair:
    """Connections of one set of ranks: for weights, and for gradients."""

    def __init__(self, group: dist.ProcessGroup, control: Control) -> None:
        self.down, self.up = (Control(group, control.timeout, control) for _ in range(2))


class _Transfer:
    """A tensor from or to each rank of ``control``, in order."""

    def __init__(self, control: Control, post: Post, tensors: Sequence[Tensor], what: str) -> None:
        self._control, self._what = control, what
        self._works = [post(tensor, rank, what) for rank, tensor in enumerate(tensors)]

    def is_complete(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            self._control.wait(work, self._what)


class _GlooSum:
    """Between nodes, once a sum within one is there."""

    def __init__(
        self, inside: _Pair, across: _Pair | None, grid: Grid, unit: Unit, packed: Tensor, count: int
    ) -> None:
        self._across, self._grid, self._count, self._what = across, grid, count, f"gradients of {unit.name}"
        sections, up = unit.sums.packing.sections(packed), inside.up
        self._transfer = _Transfer(up, up.sum, sections, self._what)
        self._segments = unit.sums.packing.segments(sections[grid.place])
        self._mean: Tensor | None = None

    def is_there(self) -> bool:
        while self._mean is None and self._transfer.is_complete():
            self._go_on()
        return self._mean is not None

    def mean(self) -> Tensor:
        while self._mean is None:
            self._go_on()
        return self._mean

    wait = mean

    def _go_on(self) -> None:
        self._transfer.wait()
        if self._across is None:
            self._mean = self._segments[self._grid.node] / self._count  # a copy, without what is other owners'
        else:
            up, self._across = self._across.up, None
            self._transfer = _Transfer(up, up.sum, self._segments, self._what)
