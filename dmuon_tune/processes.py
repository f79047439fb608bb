"""Child processes: how many fit on this machine, that they die with their parent, and how one ended in words."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")  # of version 2; inside a container its own
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def processors() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory_bytes() -> int | None:
    """What may still be taken without swapping, within the container's limit; None where the system doesn't say."""
    free = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free.append(int(line.split()[1]) * 1024)
        limit, used = ((CGROUP / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        if limit.isdecimal():
            free.append(max(0, int(limit) - int(used)))
    except OSError:
        pass
    return min(free, default=None)


def die_with(parent: int) -> None:
    """Have Linux kill this process with ``parent``'s thread that started it, even where it hangs in a driver.

    Elsewhere nothing is asked of the system: what a parent left behind must notice by itself.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        sys.exit(1)


def ended(code: int | None) -> str:
    """A process's return code as text: ``exit code 3`` or ``signal 9 (Killed)``."""
    return f"exit code {code}" if code is None or code >= 0 else f"signal {-code} ({signal.strsignal(-code)})"
