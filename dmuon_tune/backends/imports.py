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
from typing import IO

from dmuon_tune.processes import ended

from . import backends

IMPORT_TIMEOUT_S = 120.0
POLL_S = 0.05
BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from dmuon_tune.processes import die_with; die_with(int(sys.argv[3])); "
    "from dmuon_tune.backends import backends; backends()[sys.argv[2]].load()"
)


def import_failures(names: Iterable[str], timeout_s: float = math.inf) -> dict[str, str]:
    """Backend → why its DSL, though installed, does not import.

    What takes longer than ``timeout_s`` seconds has no verdict, what takes longer than ``IMPORT_TIMEOUT_S`` is a
    failure. Call it from the main thread, with which the processes die; an interrupt ends them at once.
    """
    running: dict[str, _Import] = {}
    found = {}
    try:
        for name in sorted(names):
            if hasattr(backends()[name], "load"):
                running[name] = _Import(name)
        end = time.monotonic() + timeout_s
        while running and time.monotonic() < end:
            for name, each in list(running.items()):
                if each.is_over:
                    running.pop(name).kill()
                    if (reason := each.failure()) is not None:
                        found[name] = reason
            time.sleep(POLL_S)
    finally:
        for each in running.values():
            each.kill()
    return found


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
