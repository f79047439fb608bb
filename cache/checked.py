"""Remembers beside the user's cache which entries of elsewhere passed a check on this machine's device."""

from __future__ import annotations

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
    share a home folder cannot spoil it for each other. Where none can be written, this process alone remembers."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._folder = user_cache_path(environ).parent / FOLDER

    def has(self, key_sha256: str, config: Mapping[str, Any]) -> bool:
        """Whether this configuration passed under this key, here or in an earlier process."""
        path = self._folder / artefact_id(key_sha256, config)
        return path in _passed or os.path.exists(path)

    def add(self, key_sha256: str, config: Mapping[str, Any]) -> None:
        path = self._folder / artefact_id(key_sha256, config)
        _passed.add(path)
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch()
        except OSError:
            pass  # a read-only disk: the next process checks again
