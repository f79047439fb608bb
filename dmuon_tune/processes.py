"""Child processes: they die with their parent, and how one ended in words."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


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
