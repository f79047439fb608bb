"""One lock per device across processes and users: whoever holds it may load the device."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def lock_path(device: str) -> str:
    """The lock file of ``cpu``, ``cuda`` or ``cuda:<index>``, named by the GPU's UUID where it has one."""
    name = "cpu"
    if device != "cpu":
        index = torch.device(device).index or 0
        name = str(getattr(torch.cuda.get_device_properties(index), "uuid", f"cuda{index}"))
    return os.path.join(tempfile.gettempdir(), f"dmuon-tune-{name}.lock")


@contextmanager
def device_lock(device: str) -> Iterator[None]:
    """Wait for the device's lock and hold it; the kernel releases it when this process dies."""
    descriptor = _open(lock_path(device))
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _open(path: str) -> int:
    try:
        # Without O_CREAT: in a sticky directory Linux refuses it on another user's file (fs.protected_regular).
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        os.fchmod(descriptor, 0o644)  # readable for other users whatever the umask: flock needs no more
        return descriptor
