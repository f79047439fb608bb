"""Tells whether other processes took this process's processors: how long its threads waited to run."""

from __future__ import annotations

import os
import resource
import time

CLEAN_SHARE = 0.05  # of a window, all threads' waiting together
THREADS = "/proc/self/task"


class Contention:
    """Call ``clean`` after each window: it covers all that happened since the call before."""

    def __init__(self) -> None:
        self._waited_us, self._switches, self._since = _waited_us(), _switches(), time.perf_counter()

    def clean(self) -> bool:
        """Whether threads waited for less than CLEAN_SHARE of the time since the last call; where the system does not
        say that, whether none lost its processor."""
        before_us, before_switches, since = self._waited_us, self._switches, self._since
        self._waited_us, self._switches, self._since = _waited_us(), _switches(), time.perf_counter()
        if self._waited_us is None or before_us is None:
            return self._switches == before_switches
        return self._waited_us - before_us <= CLEAN_SHARE * (self._since - since) * 1e6


def _waited_us() -> float | None:
    """Microseconds that threads of this process were ready and not running; None where Linux does not count them."""
    waited_ns = 0
    try:
        for thread in os.listdir(THREADS):
            try:
                with open(f"{THREADS}/{thread}/schedstat") as file:
                    waited_ns += int(file.read().split()[1])
            except ProcessLookupError:
                pass  # the thread ended meanwhile
    except (OSError, IndexError, ValueError):
        return None
    return waited_ns / 1000


def _switches() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
