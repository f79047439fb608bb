"""Remembers beside the user's cache which entries and compiled kernels of elsewhere passed a check on this device."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .artefacts import artefact_id
from .paths import user_cache_path

FOLDER = "checked"
_passed: set[Path] = set()  # by this process


class Checked:
    """One empty file for each entry that passed: unlike rows in a database they need no lock, so the machines that
    share a home folder cannot spoil it for each other. Where none can be written, this process alone remembers.

    ``code``: the :attr:`Artefact.code` that was loaded, empty for a kernel that was compiled here. Other code for the
    same configuration is another entry.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._folder = user_cache_path(environ).parent / FOLDER

    def has(self, key_sha256: str, config: Mapping[str, Any], code: str = "") -> bool:
        """Whether this configuration passed under this key, here or in an earlier process."""
        path = self._path(key_sha256, config, code)
        return path in _passed or os.path.exists(path)

    def add(self, key_sha256: str, config: Mapping[str, Any], code: str = "") -> None:
        path = self._path(key_sha256, config, code)
        _passed.add(path)
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch()
        except OSError:
            pass  # a read-only disk: the next process checks again

    def _path(self, key_sha256: str, config: Mapping[str, Any], code: str) -> Path:
        name = artefact_id(key_sha256, config)
        return self._folder / (hashlib.sha256(f"{name} {code}".encode()).hexdigest() if code else name)
