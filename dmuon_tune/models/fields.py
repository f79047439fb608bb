"""A config's fields, read with errors that name the field and the file it stands in."""

from __future__ import annotations

import reprlib
from typing import Any

from dmuon_tune.errors import UsageError

MAX_EXTENT = 2**24  # of one field: the largest vocabulary published has under 2**20
MAX_LAYERS = 4096
MAX_EXPERTS = 2**17  # of all layers together: the largest model published has under 2**15


class Fields:
    """A config's fields, read with errors that name the field and the file they were missing in."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def positive(self, name: str, default: int | None = None, at_most: int = MAX_EXTENT) -> int:
        """A positive integer, ``at_most`` that large; ``default`` where the field is absent or null."""
        return self._integer(name, default, 1, at_most, "a positive integer")

    def count(self, name: str, default: int | None = None) -> int:
        """As ``positive``, but 0 is one too."""
        return self._integer(name, default, 0, MAX_EXTENT, "an integer from 0 up")

    def _integer(self, name: str, default: int | None, at_least: int, at_most: int, kind: str) -> int:
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise UsageError(f"{self.where}: field {name!r} is {'null' if name in self.values else 'missing'}")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise UsageError(f"{self.where}: field {name!r} must be {kind}, not {reprlib.repr(value)}")
        if value > at_most:
            raise UsageError(f"{self.where}: field {name!r} is too large: {reprlib.repr(value)}, at most {at_most}")
        return value

    def is_null(self, name: str) -> bool:
        """Whether the field is there and says null."""
        return name in self.values and self.values[name] is None

    def layers(self, name: str) -> int:
        """The number of layers, each of which is listed."""
        return self.positive(name, at_most=MAX_LAYERS)

    def experts(self, name: str) -> int:
        """The number of experts in a layer, each of which is listed; a token can't take more than there are."""
        experts = self.positive(name, at_most=MAX_EXPERTS // self.layers("num_hidden_layers"))
        self.positive("num_experts_per_tok", 1, at_most=experts)
        return experts

    def indices(self, name: str) -> set[int]:
        """The layers that a list names; none where the field is absent or null."""
        value = self.values.get(name)
        if value is None:
            return set()
        if not isinstance(value, list) or any(type(index) is not int or index < 0 for index in value):
            raise UsageError(f"{self.where}: field {name!r} must be a list of layers, not {reprlib.repr(value)}")
        return set(value)

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
