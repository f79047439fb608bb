"""A config's fields, read with errors that name the field and the file it stands in."""

from __future__ import annotations

import reprlib
from typing import Any

from dmuon_tune.errors import UsageError

MAX_EXTENT = 2**24  # of one field: the largest vocabulary published has under 2**20
MAX_LAYERS = 4096


class Fields:
    """A config's fields, read with errors that name the field and the file they were missing in."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def positive(self, name: str, default: int | None = None, at_most: int = MAX_EXTENT) -> int:
        """A positive integer, ``at_most`` that large; ``default`` where the field is absent or null."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise UsageError(f"{self.where}: field {name!r} is {'null' if name in self.values else 'missing'}")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{self.where}: field {name!r} must be a positive integer, not {reprlib.repr(value)}")
        if value > at_most:
            raise UsageError(f"{self.where}: field {name!r} is too large: {reprlib.repr(value)}, at most {at_most}")
        return value

    def layers(self, name: str) -> int:
        """The number of layers, each of which is listed."""
        return self.positive(name, at_most=MAX_LAYERS)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UsageError(f"{self.where}: field {name!r} must be true or false, not {reprlib.repr(value)}")
        return value

    def section(self, name: str) -> Fields:
        value = self.values.get(name)
        if value is None:
            raise UsageError(f"{self.where}: section {name!r} is missing")
        if not isinstance(value, dict):
            raise UsageError(f"{self.where}: section {name!r} must be an object, not {reprlib.repr(value)}")
        return Fields(value, f"{self.where}: {name}")
