"""A GPU's memory as neighbours write to it: by copy engines, in a stream that waits for flags without a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dmuon_tune.backends import driver

BLOCK_BYTES = 2**21  # smaller ones lie together, and a handle opens all of them; CUDA Programming Guide, IPC


def memory_of(device: torch.device) -> GpuMemory | None:
    """What a device's tensors can be written through; None where that is nothing that other processes reach."""
    return GpuMemory(device) if device.type == "cuda" else None


class GpuMemory:
    """Of one CUDA device; :class:`dmuon_tune.runtime.distributed.neighbours.Memory` says what each method does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._carrying = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._stream = self._carrying.cuda_stream

    def allocate(self, nbytes: int) -> tuple[Tensor, str]:
        with self._entered():
            # Not PyTorch's: its segments are shared by tensors and cannot always be opened elsewhere.
            whole = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
            try:
                address = driver.allocate(whole)
            except driver.DriverError:
                torch.cuda.empty_cache()  # PyTorch keeps what it has freed
                address = driver.allocate(whole)
            try:
                handle = driver.export_memory(address).hex()
                return torch.as_tensor(_Bytes(address, nbytes), device=self._device), handle
            except BaseException:
                driver.free(address)
                raise

    def free(self, room: Tensor) -> None:
        with self._entered():
            torch.cuda.synchronize(self._device)
            driver.free(room.data_ptr())

    def open(self, handle: str) -> int:
        with self._entered():
            return driver.open_memory(bytes.fromhex(handle))

    def close(self, address: int) -> None:
        with self._entered():
            torch.cuda.synchronize(self._device)
            driver.close_memory(address)

    def register(self, address: int, nbytes: int) -> int:
        with self._entered():
            return driver.register_host(address, nbytes)

    def unregister(self, address: int) -> None:
        with self._entered():
            driver.unregister_host(address)

    @contextmanager
    def queue(self) -> Iterator[None]:
        with self._entered():
            self._carrying.wait_stream(torch.cuda.current_stream(self._device))
            yield

    def write(self, address: int, value: int) -> None:
        driver.write_value(self._stream, address, value)

    def wait(self, address: int, value: int) -> None:
        driver.wait_value(self._stream, address, value)

    def copy(self, into: int, source: int, nbytes: int) -> None:
        driver.copy_memory(self._stream, into, source, nbytes)

    def end(self) -> _Place:
        return _Place(self._carrying)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """The driver's calls are for this device, in whatever thread."""
        with torch.cuda.device(self._device):
            driver.enter_context(self._device.index)
            yield


class _Place:
    """A place in a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event, self._device = torch.cuda.Event(), stream.device  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        self._event.wait(torch.cuda.current_stream(self._device))


class _Bytes:
    """Memory of the driver's, as PyTorch takes it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }
