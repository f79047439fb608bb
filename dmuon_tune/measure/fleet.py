"""Several devices' measuring processes: an executor for each, and whichever of their jobs ends next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing import connection

from .executor import POLL_S, Executor
from .job import AnyJob, Outcome


class Fleet:
    """Executors that work beside each other; use it from one thread."""

    def __init__(self, executors: Sequence[Executor]) -> None:
        self._executors = tuple(executors)

    @property
    def capacity(self) -> int:
        """Jobs that may be under way at once, on all devices together."""
        return sum(each.capacity for each in self._executors)

    def with_room(self) -> list[Executor]:
        """Those with a free process, the least busy first."""
        return sorted((each for each in self._executors if each.has_room), key=lambda each: each.in_flight)

    def warm(self, jobs: int) -> None:
        """Start the processes that so many jobs will use."""
        for each in self._executors:
            each.warm(-(-jobs // len(self._executors)))

    def wait(self, timeout_s: float | None = None) -> tuple[AnyJob, Outcome] | None:
        """The next job that ends, or None after ``timeout_s`` seconds; raises as :meth:`Executor.wait` does."""
        if len(self._executors) == 1:
            return self._executors[0].wait(timeout_s)
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            busy = [each for each in self._executors if each.in_flight]
            if not busy:
                raise RuntimeError("no job is under way")
            left_s = POLL_S if end is None else min(POLL_S, end - time.monotonic())
            connection.wait([pipe for each in busy for pipe in each.pipes], max(0.0, left_s))
            for each in busy:
                ended = each.wait(0.0)
                if ended is not None:
                    return ended
            if end is not None and time.monotonic() >= end:
                return None

    def close(self) -> None:
        """Kill every process; jobs under way are forgotten."""
        for each in self._executors:
            each.close()
