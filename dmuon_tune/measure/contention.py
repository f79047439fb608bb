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
        self._waits_ns, self._switches, self._since = _waits_ns(), _switches(), time.perf_counter()

    def clean(self) -> bool:
        """Whether threads waited for less than CLEAN_SHARE of the time since the last call; where the system does not
        say that, whether none lost its processor."""
        before_ns, before_switches, since = self._waits_ns, self._switches, self._since
        self._waits_ns, self._switches, self._since = _waits_ns(), _switches(), time.perf_counter()
        if self._waits_ns is None or before_ns is None:
            return self._switches == before_switches
        # Of a thread that ended no more is known; one of its number that began has waited less in all.
        waited_ns = sum(max(0, each - before_ns.get(thread, 0)) for thread, each in self._waits_ns.items())
        return waited_ns <= CLEAN_SHARE * (self._since - since) * 1e9


def _waits_ns() -> dict[str, int] | None:
    """How long each thread of this process was ready and not running; None where Linux does not count that."""
    found = {}
    try:
        for thread in os.listdir(THREADS):
            try:
                with open(f"{THREADS}/{thread}/schedstat") as file:
                    found[thread] = int(file.read().split()[1])
            except (FileNotFoundError, ProcessLookupError):
                pass  # the thread ended meanwhile
    except (OSError, IndexError, ValueError):
        return None
    return found


def _switches() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
