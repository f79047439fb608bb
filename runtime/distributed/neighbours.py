"""Ranks of one machine that write into each other's memory, by copies that take no multiprocessor from the chains."""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from logging import getLogger
from mmap import mmap
from operator import itemgetter
from pathlib import Path
from tempfile import mkstemp
from threading import Event, Thread
from typing import Any, Protocol

from torch import Tensor

from .control import LOOK_S, Control

VARIABLE = "DMUON_TUNE_PEER_COPIES"  # 0: none
FLAGS_FOLDER = "/dev/shm"
MACHINE = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a machine
PAGE_BYTES, LINE_BYTES = 4096, 64  # a flag has a line of its own: devices do not write beside each other
READY, DONE = 0, 1  # a rank's room may be written to; what was to be written is there
TRIAL_BYTES, TRIAL_S = 64, 10.0
CYCLE, FAR_LATER = 2**32, 2**30  # numbers begin anew; FAR_LATER than one that is waited for is later than all

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

    def begin(self) -> None:
        """What is queued next waits for all that the caller has launched."""
        ...

    def write(self, address: int, value: int) -> None: ...

    def wait(self, address: int, value: int) -> None:
        """Until the flag there is ``value`` or, cyclically, later."""
        ...

    def copy(self, into: int, source: int, nbytes: int) -> None: ...

    def end(self) -> Mark: ...


class Flags:
    """One rank's flags, which others write: pages of the machine's memory, named by ``path`` until :meth:`unlink`.

    ``number`` is the last that is waited for. Its own DONE says which transfer this rank has come to the end of.
    """

    def __init__(self, size: int, path: str = "") -> None:
        self.nbytes = -(-2 * size * LINE_BYTES // PAGE_BYTES) * PAGE_BYTES
        self._own = not path
        if self._own:
            descriptor, path = mkstemp(prefix="dmuon-tune-", dir=FLAGS_FOLDER)
        else:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        self.path, self.number = path, 0
        try:
            if self._own:
                os.posix_fallocate(descriptor, 0, self.nbytes)  # a full folder says so now, and not by SIGBUS
            self._memory = mmap(descriptor, self.nbytes)
        except OSError:
            self.unlink()
            raise
        finally:
            os.close(descriptor)
        self._words = (ctypes.c_uint32 * (self.nbytes // 4)).from_buffer(self._memory)
        self.address = ctypes.addressof(self._words)

    @staticmethod
    def offset(kind: int, rank: int, size: int) -> int:
        """Of the flag of a ``kind`` that ``rank``, of so many, writes."""
        return (kind * size + rank) * LINE_BYTES

    def reached(self, number: int, rank: int, size: int) -> bool:
        """Whether rank ``rank``'s DONE is ``number`` or, cyclically, later; this asks the device nothing."""
        return (self._words[self.offset(DONE, rank, size) // 4] - number) % CYCLE < CYCLE // 2

    def release(self) -> None:
        """End every wait for them, now and later."""
        for word in range(0, len(self._words), LINE_BYTES // 4):
            self._words[word] = (self.number + FAR_LATER) % CYCLE

    def unlink(self) -> None:
        if self._own and self.path:
            with suppress(OSError):
                os.unlink(self.path)
            self.path = ""


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
    DONE. A thread ends waits that no rank will end: one has failed, or ``control``'s time is up.
    """

    def __init__(self, control: Control, memory: Memory | None, rooms: int) -> None:
        self.others: dict[int, Neighbour] = {}
        self.anywhere = False
        self._control, self._memory = control, memory
        self._sizes = [[0] * control.size for _ in range(rooms)]  # bytes, by room and rank
        self._trial = rooms  # the number of a room for the first copies
        self._rooms: dict[int, Tensor] = {}
        self._flags: Flags | None = None
        self._address = 0  # of its flags, for the queue
        self._pending: deque[tuple[int, float, str]] = deque()  # numbers, since when, of what
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
        return self._remade(grown) if grown else {}

    def post(self, room: int, sends: Sequence[tuple[int, int, int, int]], sources: Sequence[int], what: str) -> Mark:
        """Send pieces (rank, bytes from its ``room``'s start, address here, bytes) in one transfer, in which
        ``sources`` send to this rank; returns the place at which both are done."""
        assert self._memory is not None and self._flags is not None
        memory, flags = self._memory, self._flags
        flags.number = number = (flags.number + 1) % CYCLE
        memory.begin()
        for rank in sources:
            memory.write(self._theirs(rank, READY), number)
        # The rank behind this one first: not all write to one rank at a time.
        order = sorted(sends, key=lambda send: (send[0] < self._control.rank, send[0]))
        for rank, some in groupby(order, key=itemgetter(0)):
            memory.wait(self._mine(rank, READY), number)
            for _, offset, source, nbytes in some:
                memory.copy(self.others[rank].rooms[room] + offset, source, nbytes)
            memory.write(self._theirs(rank, DONE), number)
        for rank in sources:
            memory.wait(self._mine(rank, DONE), number)
        memory.write(self._mine(self._control.rank, DONE), number)
        self._pending.append((number, time.monotonic(), what))
        return memory.end()

    def look(self) -> None:
        """End the waits of transfers that no rank will end."""
        while self._pending and self._is_over(self._pending[0][0]):
            self._pending.popleft()
        if not self._pending or self._flags is None:
            return
        _, since, what = self._pending[0]
        failure = self._control.failure()
        if not failure and time.monotonic() - since >= self._control.timeout:
            failure = f"waited {self._control.timeout:g} s for {what}"
            self._control.fail(failure)
        if failure:
            self._flags.release()

    def _meet(self) -> None:
        """Find the machine's ranks, open their memory and try it; collective."""
        control = self._control
        offers = control.gather(self._offer(), "neighbours")
        own = offers[control.rank]
        here = [rank for rank, offer in enumerate(offers) if own and offer and offer["machine"] == own["machine"]]
        opened = control.gather(len(here) > 1 and self._opens(offers, here), "neighbours' memory")
        works = len(here) > 1 and all(opened[rank] for rank in here) and self._copies()
        working = control.gather(works, "neighbours' copies")
        if self._flags is not None:
            self._flags.unlink()
        if self._memory is not None and self._flags is not None:
            closed = Event()
            weakref.finalize(self, _close, self._memory, closed, self._flags, dict(self.others), self._rooms)
            Thread(target=_watch, args=(weakref.ref(self), closed), name="dmuon-tune watch", daemon=True).start()
        self.anywhere = any(working)
        if not works or not all(working[rank] for rank in here):
            self.others = {}

    def _offer(self) -> dict[str, str] | None:
        """What the others of the machine need; None where this rank has nothing for them."""
        if self._memory is None or os.environ.get(VARIABLE) == "0":
            return None
        try:
            self._flags = Flags(self._control.size)
            self._address = self._memory.register(self._flags.address, self._flags.nbytes)
            self._rooms[self._trial], handle = self._memory.allocate(TRIAL_BYTES * self._control.size)
            return {"machine": MACHINE.read_text().strip(), "flags": self._flags.path, "room": handle}
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
                    flags = Flags(self._control.size, offer["flags"])
                    other = Neighbour(flags, self._memory.register(flags.address, flags.nbytes))
                    self.others[rank] = other
                    other.rooms[self._trial] = self._memory.open(offer["room"])
        except (RuntimeError, OSError) as error:
            logger.debug("no copies between neighbours: rank %s: %s", rank, error)
            return False
        return True

    def _copies(self) -> bool:
        """Whether what this rank and the others send each other arrives."""
        assert self._flags is not None
        own, room = self._control.rank, self._rooms[self._trial].view(-1, TRIAL_BYTES)
        try:
            given = room.new_full((TRIAL_BYTES,), own % 251 + 1)
            sends = [(rank, own * TRIAL_BYTES, given.data_ptr(), TRIAL_BYTES) for rank in self.others]
            self.post(self._trial, sends, list(self.others), "the first copies between neighbours")
            until = time.monotonic() + TRIAL_S
            while not self._is_over(self._flags.number):
                if time.monotonic() >= until:
                    self._flags.release()
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
            while self._flags is not None and not self._is_over(self._flags.number):
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

    def _is_over(self, number: int) -> bool:
        return self._flags is None or self._flags.reached(number, self._control.rank, self._control.size)

    @property
    def _needed(self) -> Memory:
        assert self._memory is not None
        return self._memory

    def _theirs(self, rank: int, kind: int) -> int:
        return self.others[rank].address + Flags.offset(kind, self._control.rank, self._control.size)

    def _mine(self, rank: int, kind: int) -> int:
        return self._address + Flags.offset(kind, rank, self._control.size)


def _watch(reference: weakref.ref[Neighbours], closed: Event) -> None:
    """Look every so often, as long as the neighbours are used."""
    while not closed.wait(LOOK_S):
        neighbours = reference()
        if neighbours is None:
            return
        neighbours.look()
        del neighbours


def _close(
    memory: Memory, closed: Event, own: Flags, others: dict[int, Neighbour], rooms: dict[int, Tensor]
) -> None:
    """Give everything back; at the process's end what fails then goes with it."""
    closed.set()
    own.release()
    with suppress(RuntimeError, OSError):
        for other in others.values():
            for address in other.rooms.values():
                memory.close(address)
            memory.unregister(other.flags.address)
        for room in rooms.values():
            memory.free(room)
        memory.unregister(own.address)
