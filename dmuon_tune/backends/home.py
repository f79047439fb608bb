"""Gives a user without a home, or with one that cannot be written, a private folder for compilers' caches."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def ensure_home() -> None:
    """Set HOME where there is none, and the compilers' cache folders where what is in HOME could not be written."""
    home = Path(os.path.expanduser("~"))  # unlike Path.home(), leaves the ~ where there is none
    if home.is_absolute() and home.is_dir() and os.access(home, os.W_OK | os.X_OK):
        return
    folder = _private_folder()
    if not home.is_absolute():
        os.environ["HOME"] = str(folder)
    for compiler in ("tilelang", "triton"):
        os.environ.setdefault(f"{compiler.upper()}_CACHE_DIR", str(folder / compiler))


def _private_folder() -> Path:
    """The user's own folder of mode 0700, the same each time; a fresh one where someone else made that."""
    folder = Path(tempfile.gettempdir(), f"dmuon-tune-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return folder
    return Path(tempfile.mkdtemp(prefix="dmuon-tune-"))
