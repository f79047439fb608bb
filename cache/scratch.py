"""Temporary folders that the next one's maker removes where the process that used them was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dmuon_tune.errors import CacheError

PREFIX = "dmuon-tune-scratch-"
ADVICE = "free some space, or let TMPDIR name a folder that has it"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder of this user's alone, gone afterwards. It is locked while its process lives: what no process locks was
    left behind, whichever container or host its process ran in."""
    try:
        parent = Path(tempfile.gettempdir())
        for left in parent.glob(f"{PREFIX}*"):
            _remove_if_left(left)
        folder, lock = _made(parent)
    except OSError as error:
        raise CacheError(f"no temporary folder can be used: {error.strerror}; {ADVICE}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextmanager
def told_of_scratch(folder: Path) -> Iterator[None]:
    """For what is written into a folder of :func:`scratch_folder`: CacheError where there is no room for it."""
    try:
        yield
    except (OSError, sqlite3.Error, CacheError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition(";")[0]
        raise CacheError(f"the temporary folder {folder.parent} cannot be used: {reason}; {ADVICE}") from error


def _made(parent: Path) -> tuple[Path, int]:
    """A new folder and the descriptor that locks it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):  # a file system that locks nothing
            fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():  # else another process had it between the two calls above, and took it for one left behind
            return folder, lock
        os.close(lock)


def _remove_if_left(folder: Path) -> None:
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # another process was first
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # in use, or of a file system that cannot say
        pass
    finally:
        os.close(lock)
