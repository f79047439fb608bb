"""Memory of processes of one machine for neighbours without GPUs: files that have no names, a thread as the queue."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from mmap import mmap
from queue import SimpleQueue
from threading import Event, Thread

import torch
from torch import Tensor

MUCH_BYTES = 1000


class Place:
    """A place in the queue, and the answers of a collective that ``control.wait`` asks for on a CPU."""

    def __init__(self) -> None:
        self.reached = Event()

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self.reached.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("not yet")

    def is_completed(self) -> bool:
        return self.reached.is_set()


class HostMemory:
    """What :class:`dmuon_tune.runtime.distributed.neighbours.Memory` says; ``copied``: bytes so far."""

    def __init__(self, refuses: str = "") -> None:
        self.copied, self.refuses = 0, refuses
        self._maps: dict[int, mmap] = {}
        self._files: dict[int, int] = {}
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        Thread(target=self._work, daemon=True).start()

    def allocate(self, nbytes: int) -> tuple[Tensor, str]:
        if self.refuses == "much" and nbytes > MUCH_BYTES:
            raise OSError("no memory")
        descriptor = os.memfd_create("room")
        os.ftruncate(descriptor, nbytes)
        address = self._map(descriptor, nbytes)
        self._files[address] = descriptor
        return torch.frombuffer(self._maps[address], dtype=torch.uint8), f"/proc/{os.getpid()}/fd/{descriptor}"

    def free(self, room: Tensor) -> None:
        os.close(self._files.pop(room.data_ptr()))

    def open(self, handle: str) -> int:
        if self.refuses == "open":
            raise OSError("no way there")
        descriptor = os.open(handle, os.O_RDWR)
        try:
            return self._map(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)

    def close(self, address: int) -> None:
        del self._maps[address]

    def register(self, address: int, nbytes: int) -> int:
        return address

    def unregister(self, address: int) -> None:
        pass

    def queue(self) -> AbstractContextManager[None]:
        return nullcontext()

    def write(self, address: int, value: int) -> None:
        self._queue.put(lambda: setattr(ctypes.c_uint32.from_address(address), "value", value))

    def wait(self, address: int, value: int) -> None:
        def until() -> None:
            while (ctypes.c_uint32.from_address(address).value - value) % 2**32 >= 2**31:
                time.sleep(0.0002)

        self._queue.put(until)

    def copy(self, into: int, source: int, nbytes: int) -> None:
        self.copied += nbytes
        if self.refuses == "copy":
            return
        self._queue.put(lambda: ctypes.memmove(into, source, nbytes) and None)

    def end(self) -> Place:
        place = Place()
        self._queue.put(place.reached.set)
        return place

    def _map(self, descriptor: int, nbytes: int) -> int:
        memory = mmap(descriptor, nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._maps[address] = memory
        return address

    def _work(self) -> None:
        while True:
            self._queue.get()()
