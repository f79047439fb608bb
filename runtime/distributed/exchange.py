"""Carries pieces of matrices between their holders and their owners: packs, one transfer a round, unpacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_to_all, all_to_all_single

from ..phases import phase
from .control import Control
from .gpu_memory import memory_of
from .neighbours import Neighbours
from .pieces import Fragment, Matrix, Piece
from .rounds import Round

T = TypeVar("T")


@dataclass
class Traffic:
    """What this rank has done since the optimizer was made.

    ``ns_runs``: matrices that it orthogonalized, ``early_runs`` of them begun while a backward ran, ``undone_runs`` of
    these for nothing; ``collectives``: transfers of its exchange, whatever carries them, ``bytes_sent`` and
    ``bytes_received`` in them: what stays on the rank is no part of these.
    """

    steps: int = 0
    ns_runs: int = 0
    early_runs: int = 0
    undone_runs: int = 0
    collectives: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(frozen=True)
class Parcel:
    """One fragment of matrix ``matrix``, to or from ``rank``; ``start``: its first element in a buffer."""

    matrix: int
    fragment: Fragment
    rank: int
    start: int


@dataclass(frozen=True, eq=False)
class Transfer:
    """One rank's part of one transfer; sizes in elements, by rank. ``kept``: fragments that are here already.

    ``starts``: where in each rank's buffer what this one sends begins. ``empty``: no rank sends anything, so nothing
    is posted.
    """

    sends: tuple[Parcel, ...]
    receives: tuple[Parcel, ...]
    kept: tuple[Parcel, ...]
    send_sizes: tuple[int, ...]
    receive_sizes: tuple[int, ...]
    starts: tuple[int, ...]
    empty: bool

    @cached_property
    def lands(self) -> tuple[tuple[int, int, int], ...]:
        """(Rank, first element in its buffer, elements) of each of the ``sends``."""
        begins = list(accumulate(self.send_sizes, initial=0))
        return tuple(
            (parcel.rank, self.starts[parcel.rank] + parcel.start - begins[parcel.rank], parcel.fragment.numel)
            for parcel in self.sends
        )


def to_owners(within: Round, matrices: Sequence[Matrix], rank: int) -> Transfer:
    """Every piece of the round's matrices from one of its holders to the owner."""
    return _transfer(
        ((piece.sender(owner), owner, place, piece)
         for owner, batch in enumerate(within.batches) for place in batch for piece in matrices[place].pieces),
        rank, len(within.batches),
    )


def to_holders(within: Round, matrices: Sequence[Matrix], rank: int) -> Transfer:
    """Every piece of the round's matrices from the owner to all of its holders."""
    return _transfer(
        ((owner, holder, place, piece) for owner, batch in enumerate(within.batches) for place in batch
         for piece in matrices[place].pieces for holder in piece.holders),
        rank, len(within.batches),
    )


def _transfer(flow: Iterator[tuple[int, int, int, Piece]], rank: int, world: int) -> Transfer:
    """Of all that flows, (source, target, matrix, piece) in an order that is the same on all ranks."""
    sends: list[list[tuple[int, Fragment]]] = [[] for _ in range(world)]
    receives: list[list[tuple[int, Fragment]]] = [[] for _ in range(world)]
    kept: list[Parcel] = []
    starts, empty = [0] * world, True
    for source, target, matrix, piece in flow:
        empty = empty and source == target
        if source < rank and source != target:
            starts[target] += sum(fragment.numel for fragment in piece.fragments)
        if source == target == rank:
            kept += [Parcel(matrix, fragment, rank, 0) for fragment in piece.fragments]
        elif source == rank:
            sends[target] += [(matrix, fragment) for fragment in piece.fragments]
        elif target == rank:
            receives[source] += [(matrix, fragment) for fragment in piece.fragments]
    sizes = _sizes(sends), _sizes(receives)
    return Transfer(_parcels(sends), _parcels(receives), tuple(kept), *sizes, tuple(starts), empty)


def _parcels(by_rank: Sequence[Sequence[tuple[int, Fragment]]]) -> tuple[Parcel, ...]:
    found, start = [], 0
    for rank, some in enumerate(by_rank):
        for matrix, fragment in some:
            found.append(Parcel(matrix, fragment, rank, start))
            start += fragment.numel
    return tuple(found)


def _sizes(by_rank: Sequence[Sequence[tuple[int, Fragment]]]) -> tuple[int, ...]:
    return tuple(sum(fragment.numel for _, fragment in some) for some in by_rank)


class Room:
    """A flat buffer that is kept from step to step and grows, and the views of it that its users have while they live.
    """

    def __init__(self, device: torch.device) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._views: WeakKeyDictionary[Any, dict[torch.dtype, Any]] = WeakKeyDictionary()

    def hold(self, memory: Tensor) -> None:
        """Lie there from now on; nobody may be using the buffer."""
        self._bytes = memory
        self._views.clear()

    def view(self, user: Any, numel: int, dtype: torch.dtype, make: Callable[[Tensor], T]) -> T:
        """``make`` of the first ``numel`` elements; made once for each user and dtype while the buffer is the same."""
        nbytes = numel * dtype.itemsize
        if nbytes > self._bytes.numel():
            if self._bytes.is_cuda and self._bytes.numel():  # several streams may still use it
                torch.cuda.synchronize(self._bytes.device)
            self.hold(torch.empty(nbytes, dtype=torch.uint8, device=self._bytes.device))
        views = self._views.setdefault(user, {})
        if dtype not in views:
            views[dtype] = make(self._bytes[:nbytes].view(dtype))
        found: T = views[dtype]
        return found


@dataclass
class Posted:
    """A transfer under way, carried by ``works``; ``arrived`` are its ``receives``, in order, to be read after a wait
    for it."""

    transfer: Transfer
    arrived: list[Tensor]
    works: list[Any]
    what: str


class Slot:
    """Where one transfer under way is packed and arrives; ``number`` is the same on all ranks."""

    def __init__(self, device: torch.device, number: int) -> None:
        self.out, self.into, self.number = Room(device), Room(device), number


class Exchange:
    """Posts transfers, all ranks of ``group`` in the same order, and counts what they carry; made by all together.

    Between GPUs of one machine copy engines carry, where they can; what is left the group's backend.
    """

    def __init__(
        self, group: ProcessGroup, control: Control, traffic: Traffic, device: torch.device, slots: int
    ) -> None:
        self.slots = [Slot(device, number) for number in range(slots)]
        self._group, self._control, self._traffic, self._device = group, control, traffic, device
        self._neighbours = Neighbours(control, memory_of(device), slots)

    def reserve(self, wanted: Sequence[int]) -> None:
        """Let so many bytes arrive in each slot, by number; collective, and nothing may be under way."""
        for number, memory in self._neighbours.reserve(wanted).items():
            self.slots[number].into.hold(memory)

    def post(self, transfer: Transfer, dtype: torch.dtype, slot: Slot, given: Sequence[Tensor], what: str) -> Posted:
        """Send ``given``, one tensor for each of the transfer's ``sends``, of the fragment's shape.

        They, and the slot's buffers, are in use until the transfer has been waited for and what arrived has been read.
        """
        sent, received = sum(transfer.send_sizes), sum(transfer.receive_sizes)
        into, arrived = slot.into.view(transfer, received, dtype, lambda flat: (flat, _views(flat, transfer.receives)))
        into = into.view(torch.uint8)  # as bytes: whether a backend knows the dtype does not matter
        if transfer.empty:
            return Posted(transfer, arrived, [], what)
        near, works = self._neighbours.others, list[Any]()
        if len(near) + 1 == self._control.size and all(_is_flat(each, dtype) for each in given):
            works.append(self._copied(transfer, dtype.itemsize, slot, given, what))
        else:
            out, parcels = slot.out.view(transfer, sent, dtype, lambda flat: (flat, _views(flat, transfer.sends)))
            copy(parcels, given)
            if near:
                works.append(self._copied(transfer, dtype.itemsize, slot, parcels, what))
            if len(near) + 1 < self._control.size:
                works.append(self._carried(transfer, dtype.itemsize, into, out.view(torch.uint8), what))
        self._traffic.collectives += 1
        self._traffic.bytes_sent += sent * dtype.itemsize
        self._traffic.bytes_received += received * dtype.itemsize
        return Posted(transfer, arrived, works, what)

    def _copied(self, transfer: Transfer, size: int, slot: Slot, given: Sequence[Tensor], what: str) -> Any:
        """What copies to neighbours, ``size`` bytes an element, from where it lies: each parcel as one piece."""
        near = self._neighbours.others
        sends = [
            (rank, start * size, each.data_ptr(), count * size)
            for (rank, start, count), each in zip(transfer.lands, given, strict=True) if rank in near
        ]
        return self._neighbours.post(slot.number, sends, [rank for rank in near if transfer.receive_sizes[rank]], what)

    def _carried(self, transfer: Transfer, size: int, into: Tensor, out: Tensor, what: str) -> Any:
        """What carries to ranks that are no neighbours, ``size`` bytes an element."""
        near = self._neighbours.others
        into_sizes, out_sizes = ([count * size for count in counts]
                                 for counts in (transfer.receive_sizes, transfer.send_sizes))
        if self._device.type == "cpu":
            # A gloo group with a collective in flight keeps a process from ending; control's has a timeout of ours.
            return self._control.all_to_all(into, out, into_sizes, out_sizes, what)
        if not self._neighbours.anywhere:
            return self._control.post(lambda: all_to_all_single(
                into, out, into_sizes, out_sizes, group=self._group, async_op=True
            ), what)
        arriving, leaving = ([part[:0] if rank in near else part for rank, part in enumerate(parts)]
                             for parts in (torch.split(into, into_sizes), torch.split(out, out_sizes)))
        return self._control.post(lambda: all_to_all(arriving, leaving, group=self._group, async_op=True), what)

    def wait(self, posted: Posted) -> list[Tensor]:
        """What arrived; on a GPU the current stream waits, on a CPU the caller."""
        if posted.works:
            with phase("wait"):
                for work in posted.works:
                    self._control.wait(work, posted.what, self._device)
            posted.works.clear()
        return posted.arrived


def _is_flat(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether its bytes can be sent as they lie."""
    return tensor.dtype == dtype and tensor.is_contiguous()


def _views(flat: Tensor, parcels: Sequence[Parcel]) -> list[Tensor]:
    return [
        flat[parcel.start : parcel.start + parcel.fragment.numel].view(parcel.fragment.shape) for parcel in parcels
    ]


def copy(into: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Each tensor into its place, in as few launches as there can be."""
    if into:
        torch._foreach_copy_(list(into), list(given))
