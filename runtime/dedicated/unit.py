"""A unit: the dedicated matrices that a module uses, where their weights come to lie, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..distributed.whole import Whole
from .grid import Grid

ALIGNED_BYTES = 256  # where a matrix begins, as kernels want it; PyTorch's allocator aligns twice as much


class Member(NamedTuple):
    whole: Whole
    p: nn.Parameter


class Packing:
    """Where matrices lie in one flat buffer, ``itemsize`` bytes an element: by owner, so that one transfer brings an
    owner's. A *segment* is an owner's part, a *section* that of all owners at one place of their nodes."""

    def __init__(self, members: Sequence[Member], grid: Grid, itemsize: int) -> None:
        step, self._grid = ALIGNED_BYTES // itemsize, grid
        self._spans: list[tuple[int, torch.Size]] = [(0, torch.Size())] * len(members)
        self._segments: dict[int, slice] = {}
        end = 0
        for rank in grid.order:
            begin = end
            for place, (whole, p) in enumerate(members):
                if whole.owner == rank:
                    self._spans[place] = end, p.shape
                    end += -(-p.numel() // step) * step
            # Each has a segment: whether a backend carries none of nothing is not to matter.
            end = max(end, begin + step)
            self._segments[rank] = slice(begin, end)
        self.numel = end
        self._own = self._segments[grid.rows[grid.node][grid.place]]

    def sections(self, flat: Tensor) -> list[Tensor]:
        """By place."""
        first, last = self._grid.rows[0], self._grid.rows[-1]
        return [flat[self._segments[one].start : self._segments[other].stop]
                for one, other in zip(first, last, strict=True)]

    def segments(self, section: Tensor) -> list[Tensor]:
        """Of the section at this rank's place, by node."""
        column = [self._segments[row[self._grid.place]] for row in self._grid.rows]
        first = column[0].start
        return [section[segment.start - first : segment.stop - first] for segment in column]

    def views(self, flat: Tensor) -> list[Tensor]:
        """A matrix each."""
        return [flat[begin : begin + shape.numel()].view(shape) for begin, shape in self._spans]

    def own(self, segment: Tensor, places: Sequence[int]) -> list[Tensor]:
        """The matrices at ``places``, which this rank owns, in its segment."""
        spans = [(begin - self._own.start, shape) for begin, shape in (self._spans[place] for place in places)]
        return [segment[begin : begin + shape.numel()].view(shape) for begin, shape in spans]


class Unit:
    """``members`` are what the module ``name`` uses together; ``stays``: from forward to backward.

    Their parameters are views of one buffer, whose memory is there only while it is used (:meth:`allocate`,
    :meth:`free`), as that of FSDP2's; otherwise one NaN, which can be read and not be written to. The buffer is written
    to beside the parameters, whose versions stay.
    """

    def __init__(
        self, name: str, members: Sequence[Member], dtype: torch.dtype, reduce_dtype: torch.dtype,
        device: torch.device, grid: Grid, stays: bool,
    ) -> None:
        self.name, self.members, self.stays = name, list(members), stays
        self.packing = Packing(members, grid, dtype.itemsize)
        self.flat = torch.empty(self.packing.numel, dtype=dtype, device=device)
        self.sections = self.packing.sections(self.flat)
        self.own = [place for place, member in enumerate(members) if member.whole.is_here]
        for member in members:
            member.p.grad = None
            member.p.grad_dtype = None  # the owner's is of the master's dtype
        self._views = self.packing.views(self.flat)
        nan = torch.full((), torch.nan, dtype=dtype, device=device)
        # A fused kernel would write one element's memory as if all were there.
        torch._C._set_throw_on_mutable_data_ptr(nan)
        self._absent = [nan.expand(member.p.shape) for member in members]
        self._storage = self.flat.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self.free()
        self.sums = Sums(members, reduce_dtype, device, grid)

    @property
    def is_here(self) -> bool:
        """Whether there is memory for the weights, and they are in it or on their way."""
        return self._storage.nbytes() > 0

    def allocate(self) -> None:
        self._storage.resize_(self._nbytes)
        self._show(self._views)

    def free(self) -> None:
        self._storage.resize_(0)
        self._show(self._absent)

    def _show(self, tensors: Sequence[Tensor]) -> None:
        for member, tensor in zip(self.members, tensors, strict=True):
            member.p.data = tensor

    def fill(self, segment: Tensor) -> None:
        """Write what this rank owns, in the dtype of computation, to its segment."""
        if self.own:
            weights = [self.members[place].whole.weight for place in self.own]
            torch._foreach_copy_(self.packing.own(segment, self.own), weights)


class Sums:
    """The gradients of a unit's matrices on this rank, packed by owner while they are not reduced.

    ``fresh`` are the places of those that came in this backward, ``waiting`` of those that are in the buffer,
    ``before`` what the ``.grad`` was of one that is just coming. ``lost`` are those of which an exception has taken
    what no_sync had added up.
    """

    def __init__(self, members: Sequence[Member], dtype: torch.dtype, device: torch.device, grid: Grid) -> None:
        self.dtype, self.packing = dtype, Packing(members, grid, dtype.itemsize)
        self.fresh: set[int] = set()
        self.waiting: set[int] = set()
        self.lost: set[int] = set()
        self._added_up: set[int] = set()  # of those that are fresh, earlier ones too
        self.before: Tensor | None = None
        self.buffer: Tensor | None = None
        self._device = device
        self._views: list[Tensor] = []

    def hold(self, place: int, before: Tensor | None) -> None:
        """A gradient is about to come to a parameter whose ``.grad`` is ``before``: without one, earlier are void."""
        if place not in self.fresh:
            if before is None:
                self.drop(place)
            elif place in self.waiting:
                self._added_up.add(place)
        self.before = before

    def drop(self, place: int) -> None:
        """Earlier gradients are void."""
        self.waiting.discard(place)
        self.lost.discard(place)

    def add(self, place: int, gradient: Tensor) -> None:
        if self.buffer is None:
            self.buffer = torch.empty(self.packing.numel, dtype=self.dtype, device=self._device)
            self._views = self.packing.views(self.buffer)
        if place in self.waiting:
            self._views[place].add_(gradient)
        else:
            self._views[place].copy_(gradient)
        self.fresh.add(place)
        self.waiting.add(place)

    def taken(self, count: int) -> Tensor:
        """The buffer, zeros for those of ``count`` that have not come; a new one is made for what comes later."""
        if self.buffer is None:
            self.buffer = torch.zeros(self.packing.numel, dtype=self.dtype, device=self._device)
        elif len(self.waiting) < count:
            torch._foreach_zero_([self._views[place] for place in range(count) if place not in self.waiting])
        found, self.buffer, self._views = self.buffer, None, []
        return found

    def lose(self) -> None:
        """A backward has broken off: what it has brought is void, and in the buffer cannot be told from the rest."""
        self.lost |= (self.waiting - self.fresh) | self._added_up
        self.forget()

    def forget(self) -> None:
        """What has come is summed."""
        self.waiting.clear()
        self.buffer, self._views = None, []
        self.end()

    def end(self) -> None:
        """The backward is over."""
        self.fresh.clear()
        self._added_up.clear()
