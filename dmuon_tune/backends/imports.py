"""Whether the DSLs that are installed also import: each tried in a process of its own, all at once."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import IO, Self

from dmuon_tune.processes import ended

from . import backends

IMPORT_TIMEOUT_S = 120.0
POLL_S = 0.05
BOOTSTRAP = (  # garbage would be collected for a sixth of the time
    "import gc, json, sys; gc.disable(); sys.path[:] = json.loads(sys.argv[1]); "
    "from dmuon_tune.processes import die_with; die_with(int(sys.argv[3])); "
    "from dmuon_tune.backends import backends; backends()[sys.argv[2]].load()"
)


class ImportCheck:
    """Whether the DSLs of these backends import, found out beside other work once it ``begin``s.

    Use it from the main thread, with which its processes die; leaving it as a context manager ends them, and what had
    no verdict by then has none. What takes longer than ``IMPORT_TIMEOUT_S`` is a failure.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.failures: dict[str, str] = {}  # backend → why its DSL, though installed, does not import
        self._waiting = sorted(name for name in names if hasattr(backends()[name], "load"))
        self._running: dict[str, _Import] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for each in self._running.values():
            each.kill()
        self._waiting, self._running = [], {}

    @property
    def is_over(self) -> bool:
        """Whether every backend has its verdict."""
        return not self._waiting and not self._running

    def imports(self, name: str) -> bool:
        """Whether a backend is known to import, or has nothing to import."""
        return name not in (*self._waiting, *self._running, *self.failures)

    def begin(self) -> None:
        """Start all that was not started yet."""
        while self._waiting:
            name = self._waiting.pop()
            self._running[name] = _Import(name)

    def poll(self) -> list[str]:
        """The backends that have turned out not to import since the last time."""
        failed = []
        for name, each in list(self._running.items()):
            if each.is_over:
                self._running.pop(name).kill()
                if (reason := each.failure()) is not None:
                    self.failures[name] = reason
                    failed.append(name)
        return failed


def import_failures(names: Iterable[str], timeout_s: float = math.inf) -> dict[str, str]:
    """Backend → why its DSL, though installed, does not import; no verdict on what takes longer than ``timeout_s``."""
    with ImportCheck(names) as check:
        check.begin()
        end = time.monotonic() + timeout_s
        while not check.is_over and time.monotonic() < end:
            check.poll()
            time.sleep(POLL_S)
    return check.failures


class _Import:
    """One process that imports one DSL."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        self._begin = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOTSTRAP, json.dumps(sys.path), name, str(os.getpid())],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._errors, start_new_session=True,
        )

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None or time.monotonic() - self._begin > IMPORT_TIMEOUT_S

    def failure(self) -> str | None:
        """Why it failed, once it is over and killed; None where it did not."""
        code = self._process.returncode
        if code == 0:
            return None
        if time.monotonic() - self._begin > IMPORT_TIMEOUT_S:
            return f"{self.name} is installed, but importing it takes more than {IMPORT_TIMEOUT_S:.0f} s; reinstall it"
        self._errors.seek(0)
        last = _exception(self._errors.read().decode(errors="replace"))
        return f"{self.name} is installed, but importing it fails: {last or ended(code)}; reinstall it"

    def kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self._process.wait()


def _exception(errors: str) -> str:
    """The exception that ended a process: a traceback's first line after its frames; "" where there is none."""
    _, found, after = errors.rpartition("Traceback (most recent call last):")
    return next((line for line in after.splitlines() if line and not line.startswith(" ")), "") if found else ""
