"""Flags by which ranks of one machine wait for each other's copies, and the end of waits that no rank will end."""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from logging import getLogger
from mmap import mmap
from tempfile import mkstemp
from threading import Event, Thread, current_thread
from typing import NamedTuple

from dmuon_tune.words import ranks_named

from .control import LOOK_S, Control

FLAGS_FOLDER = "/dev/shm"
PAGE_BYTES, LINE_BYTES = 4096, 64  # a flag has a line of its own: devices do not write beside each other
READY, DONE = 0, 1  # a rank's room may be written to; what was to be written is there
CYCLE, FAR_LATER = 2**32, 2**30  # numbers begin anew; FAR_LATER than one that is waited for is later than all
FINISH_S = 30.0  # for transfers under way at the end: a rank's GPU is seldom so far behind another's

logger = getLogger("dmuon_tune.runtime")


class Flags:
    """The flags of ``rank``, of ``size``, which all write: pages of the machine's memory, named by ``path`` until
    :meth:`unlink`. Its own DONE says which transfer the rank has come to the end of."""

    def __init__(self, rank: int, size: int, path: str = "") -> None:
        self.nbytes = -(-2 * size * LINE_BYTES // PAGE_BYTES) * PAGE_BYTES
        self._rank, self._size, self._own = rank, size, not path
        if self._own:
            descriptor, path = mkstemp(prefix="dmuon-tune-", dir=FLAGS_FOLDER)
        else:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        self.path = path
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

    def offset(self, kind: int, rank: int) -> int:
        """Of the flag of a ``kind`` that ``rank`` writes."""
        return (kind * self._size + rank) * LINE_BYTES

    def reached(self, number: int) -> bool:
        """Whether the rank's own DONE is ``number`` or, cyclically, later; this asks the device nothing."""
        return self.wrote(DONE, self._rank, number)

    def wrote(self, kind: int, rank: int, number: int) -> bool:
        """Whether ``rank`` has written the flag of this ``kind`` for ``number`` or, cyclically, a later one."""
        return (self._words[self.offset(kind, rank) // 4] - number) % CYCLE < CYCLE // 2

    def release(self, number: int) -> None:
        """End every wait for a ``number`` or a later one; the rank's own DONE stays its queue's to write."""
        for place in range(0, self.nbytes, LINE_BYTES):
            if place != self.offset(DONE, self._rank):
                self._words[place // 4] = (number + FAR_LATER) % CYCLE

    def unlink(self) -> None:
        if self._own and self.path:
            with suppress(OSError):
                os.unlink(self.path)
            self.path = ""


class Transfer(NamedTuple):
    """One under way: its number, since when, of what, and the flags, (kind, rank), that it waits for."""

    number: int
    since: float
    what: str
    awaited: Collection[tuple[int, int]]


class Waits:
    """A rank's transfers, by number, and when they have come to their end; ``flags`` are its own.

    Once it may :meth:`watch`, a thread ends waits that no rank will end: one has failed, or ``control``'s time is up.
    Every later call of ``control`` then raises, so nobody goes on with what has not arrived.
    """

    def __init__(self, control: Control, flags: Flags) -> None:
        self.flags = flags
        self._control = control
        self._number = self._posted = 0
        self._pending: deque[Transfer] = deque()
        self._doubted = 0  # the transfer that was first under way when a failure was heard of
        self._ended, self._process = Event(), os.getpid()
        self._thread: Thread | None = None

    def next(self) -> int:
        """The number of a transfer that is to be posted."""
        self._number = (self._number + 1) % CYCLE
        return self._number

    def posted(self, number: int, what: str, awaited: Collection[tuple[int, int]]) -> None:
        """A transfer that comes to its end once these flags, (kind, rank), are written for it."""
        self._pending.append(Transfer(number, time.monotonic(), f"{what}, step {self._control.step}", awaited))
        self._posted = number

    @property
    def under_way(self) -> bool:
        """Whether any transfer is."""
        return not self.flags.reached(self._posted)

    def release(self) -> None:
        self.flags.release(self._number)

    def watch(self) -> None:
        """Look every so often from now on, until :meth:`finish`."""
        self._thread = Thread(target=self._watch, name="dmuon-tune watch", daemon=True)
        self._thread.start()

    def finish(self, seconds: float = FINISH_S) -> bool:
        """Wait until nothing is under way, then watch no more; False where it did not come to its end."""
        if os.getpid() != self._process:  # a fork's: the flags are its parent's
            return False
        until = time.monotonic() + seconds
        while self.under_way and time.monotonic() < until:
            time.sleep(0.001)
        self._ended.set()
        if self._thread is not None and self._thread is not current_thread():
            self._thread.join(LOOK_S)
        if self.under_way:
            logger.warning("copies to and from other ranks have not come to their end; weights may be wrong")
            self.release()
        return not self.under_way

    def look(self) -> None:
        """End the waits of transfers that no rank will end."""
        while self._pending and self.flags.reached(self._pending[0].number):
            self._pending.popleft()
        if not self._pending:
            return
        first, failure = self._pending[0], self._control.failure()
        if time.monotonic() - first.since >= self._control.timeout:
            failure = failure or f"waited {self._control.timeout:g} s for {first.what}; {self._missing(first)}"
        elif failure and self._doubted != first.number:
            self._doubted = first.number  # what the rank had posted before it failed may still come until the next look
            return
        if failure:
            self._control.fail(failure)
            self.release()

    def _missing(self, transfer: Transfer) -> str:
        """Whom it waits for."""
        ranks = {rank for kind, rank in transfer.awaited if not self.flags.wrote(kind, rank, transfer.number)}
        if not ranks:
            return "this rank's GPU has not come to it"
        return f"not arrived: {ranks_named(self._control.ranks[rank] for rank in sorted(ranks))}"

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.look()
