"""Ranks of one machine that write into each other's memory, by copies that take no multiprocessor from the chains."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from logging import getLogger
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from .control import Control
from .flags import DONE, READY, Flags, Waits

VARIABLE = "DMUON_TUNE_PEER_COPIES"  # 0: none
MACHINE = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a machine
TRIAL_BYTES, TRIAL_S = 64, 10.0

logger = getLogger("dmuon_tune.runtime")


class Mark(Protocol):
    """A place in a queue."""

    def wait(self) -> Any:
        """Let what the caller launches from here on wait until it is reached."""
        ...


class Memory(Protocol):
    """Memory that other processes of the machine can write to, and a queue of what this one writes.

    Addresses are this process's. What fails raises RuntimeError or OSError.
    """

    def allocate(self, nbytes: int) -> tuple[Tensor, str]:
        """Bytes, and the handle by which other processes open them."""
        ...

    def free(self, room: Tensor) -> None: ...

    def open(self, handle: str) -> int: ...

    def close(self, address: int) -> None: ...

    def register(self, address: int, nbytes: int) -> int:
        """Where the queue finds what the host has at ``address``, a page's."""
        ...

    def unregister(self, address: int) -> None: ...

    def queue(self) -> AbstractContextManager[None]:
        """What is queued inside waits for all that the caller has launched."""
        ...

    def write(self, address: int, value: int) -> None: ...

    def wait(self, address: int, value: int) -> None:
        """Until the flag there is ``value`` or, cyclically, later."""
        ...

    def copy(self, into: int, source: int, nbytes: int) -> None: ...

    def end(self) -> Mark: ...


@dataclass
class Neighbour:
    """Another rank of the machine: its flags, where the queue finds them, and its rooms by number."""

    flags: Flags
    address: int
    rooms: dict[int, int] = field(default_factory=dict)


class Neighbours:
    """The ranks of this one's machine that write into each other's rooms; made by all ranks of ``control`` together.

    ``others`` are these ranks: none where there are none, or one of them cannot write to another; ``anywhere`` says
    whether any rank of the group has some. All ranks post the same transfers in the same order, so one number counts
    them on all. A sender waits for the receiver's READY of that number, copies, and writes DONE; the receiver waits for
    DONE.
    """

    def __init__(self, control: Control, memory: Memory | None, rooms: int) -> None:
        self.others: dict[int, Neighbour] = {}
        self.anywhere = False
        self._control, self._memory = control, memory
        self._trial = rooms  # the number of a room for the first copies
        self._sizes = [[0] * control.size for _ in range(rooms)]  # bytes, by room and rank
        self._sizes.append([TRIAL_BYTES * control.size] * control.size)
        self._rooms: dict[int, Tensor] = {}
        self._waits: Waits | None = None
        self._address = 0  # of its flags, for the queue
        if control.size > 1 and any(control.agree("memory of neighbours", [memory is not None])):
            self._meet()

    def reserve(self, wanted: Sequence[int]) -> dict[int, Tensor]:
        """Make rooms hold at least so many bytes, by number; collective. Returns those that are new."""
        if not self.anywhere:
            return {}
        every = self._control.gather(list(wanted) if self.others else [0] * len(wanted), "buffers")
        grown = [(rank, number) for rank, sizes in enumerate(every) for number, nbytes in enumerate(sizes)
                 if nbytes > self._sizes[number][rank]]
        for rank, number in grown:
            self._sizes[number][rank] = every[rank][number]
        if not grown:
            return {}
        with self._control.guard("buffers"):  # half made, nobody can use them
            return self._remade(grown)

    def post(self, room: int, sends: Sequence[tuple[int, int, int, int]], sources: Sequence[int], what: str) -> Mark:
        """Send pieces (rank, bytes from its ``room``'s start, address here, bytes) in one transfer, in which
        ``sources`` send to this rank; returns the place at which both are done."""
        assert self._memory is not None and self._waits is not None
        self._control.check()
        memory, number = self._memory, self._waits.next()
        with memory.queue():
            for rank in sources:
                memory.write(self._theirs(rank, READY), number)
            # The rank behind this one first: not all write to one rank at a time.
            order = sorted(sends, key=lambda send: (send[0] < self._control.rank, send[0]))
            for rank, some in groupby(order, key=itemgetter(0)):
                memory.wait(self._mine(rank, READY), number)
                for _, offset, source, nbytes in some:
                    assert offset + nbytes <= self._sizes[room][rank]
                    memory.copy(self.others[rank].rooms[room] + offset, source, nbytes)
                memory.write(self._theirs(rank, DONE), number)
            for rank in sources:
                memory.wait(self._mine(rank, DONE), number)
            memory.write(self._mine(self._control.rank, DONE), number)
            awaited = [*((READY, rank) for rank in {rank for rank, *_ in sends}), *((DONE, rank) for rank in sources)]
            self._waits.posted(number, what, awaited)
            return memory.end()

    def _meet(self) -> None:
        """Find the machine's ranks, open their memory and try it; collective."""
        control = self._control
        try:
            offers = control.gather(self._offer(), "neighbours")
            machines = {rank: offer["machine"] for rank, offer in enumerate(offers) if offer}
            own = machines.get(control.rank)
            here = [rank for rank, machine in machines.items() if machine == own]
            opened = control.gather(len(here) > 1 and self._opens(offers, here), "neighbours' memory")
            works = len(here) > 1 and all(opened[rank] for rank in here) and self._copies()
            working = control.gather(works, "neighbours' copies")
        finally:
            if self._waits is not None:
                self._waits.flags.unlink()
        used = set(machines.values()) - {machine for rank, machine in machines.items() if not working[rank]}
        self.anywhere = bool(used)
        if own not in used:
            self.others = {}
        elif self._waits is not None:
            self._waits.watch()

    def _offer(self) -> dict[str, str] | None:
        """What the others of the machine need; None where this rank has nothing for them."""
        if self._memory is None or os.environ.get(VARIABLE) == "0":
            return None
        try:
            flags = Flags(self._control.rank, self._control.size)
            self._waits = waits = Waits(self._control, flags)
            weakref.finalize(self, waits.finish)  # at the process's end too: others may still read what it sends
            # At its end all else goes with it, and a device that does not answer must not hold it.
            weakref.finalize(self, _close, self._memory, waits, self.others, self._rooms).atexit = False
            self._address = self._memory.register(flags.address, flags.nbytes)
            room, handle = self._memory.allocate(self._sizes[self._trial][self._control.rank])
            self._rooms[self._trial] = room
            room.zero_().sum().item()  # waits for what the caller has launched: it is no part of the trial's time
            return {"machine": MACHINE.read_text().strip(), "flags": flags.path, "room": handle}
        except (RuntimeError, OSError) as error:
            logger.debug("no copies between neighbours: %s", error)
            return None

    def _opens(self, offers: Sequence[dict[str, str] | None], here: Sequence[int]) -> bool:
        """Whether the memory of all others here is this rank's to write to."""
        assert self._memory is not None
        try:
            for rank in here:
                offer = offers[rank]
                if rank != self._control.rank and offer is not None:
                    flags = Flags(rank, self._control.size, offer["flags"])
                    other = Neighbour(flags, self._memory.register(flags.address, flags.nbytes))
                    self.others[rank] = other
                    other.rooms[self._trial] = self._memory.open(offer["room"])
        except (RuntimeError, OSError, ValueError) as error:  # the last: a file of another's, which is too short
            logger.debug("no copies between neighbours: rank %s: %s", rank, error)
            return False
        return True

    def _copies(self) -> bool:
        """Whether what this rank and the others send each other arrives."""
        assert self._waits is not None
        own, room = self._control.rank, self._rooms[self._trial].view(-1, TRIAL_BYTES)
        try:
            given = room.new_full((TRIAL_BYTES,), own % 251 + 1)
            sends = [(rank, own * TRIAL_BYTES, given.data_ptr(), TRIAL_BYTES) for rank in self.others]
            self.post(self._trial, sends, list(self.others), "the first copies between neighbours")
            until = time.monotonic() + TRIAL_S
            while self._waits.under_way:
                if time.monotonic() >= until:
                    self._waits.release()
                    return False
                time.sleep(0.001)
            return all(bool((room[rank] == rank % 251 + 1).all()) for rank in self.others)
        except (RuntimeError, OSError) as error:
            logger.debug("no copies between neighbours: %s", error)
            return False

    def _remade(self, grown: Sequence[tuple[int, int]]) -> dict[int, Tensor]:
        """Rooms that are too small, by rank and number, closed by all, made anew and opened; collective."""
        control, own = self._control, [number for rank, number in grown if rank == self._control.rank]
        error: Exception | None = None
        try:
            while self.others and self._waits is not None and self._waits.under_way:
                time.sleep(0.0005)  # the thread that looks ends it if no rank does
            for rank, number in grown:
                if rank in self.others and number in self.others[rank].rooms:
                    self._needed.close(self.others[rank].rooms.pop(number))
        except (RuntimeError, OSError) as raised:
            error = raised
        control.agree("buffers closed", error=error)
        handles: dict[int, str] = {}
        try:
            for number in own:
                if number in self._rooms:
                    self._needed.free(self._rooms.pop(number))
                nbytes = self._sizes[number][control.rank]
                self._rooms[number], handles[number] = self._needed.allocate(nbytes)
        except (RuntimeError, OSError) as raised:
            error = raised
        told = control.gather(list(handles.items()), "buffers made", error)
        try:
            for rank, other in self.others.items():
                other.rooms |= {number: self._needed.open(handle) for number, handle in told[rank]}
        except (RuntimeError, OSError) as raised:
            error = raised
        control.agree("buffers opened", error=error)
        return {number: self._rooms[number] for number in own}

    @property
    def _needed(self) -> Memory:
        assert self._memory is not None
        return self._memory

    def _theirs(self, rank: int, kind: int) -> int:
        other = self.others[rank]
        return other.address + other.flags.offset(kind, self._control.rank)

    def _mine(self, rank: int, kind: int) -> int:
        assert self._waits is not None
        return self._address + self._waits.flags.offset(kind, rank)


def _close(memory: Memory, waits: Waits, others: dict[int, Neighbour], rooms: dict[int, Tensor]) -> None:
    """Give everything back once nothing is under way."""
    if not waits.finish():
        return  # a device that has failed keeps it
    with suppress(RuntimeError, OSError):
        for other in others.values():
            for address in other.rooms.values():
                memory.close(address)
            memory.unregister(other.flags.address)
        for room in rooms.values():
            memory.free(room)
        memory.unregister(waits.flags.address)
