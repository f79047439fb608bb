"""How messages put counts and values: the right plural, a value in one short line."""

from __future__ import annotations

import reprlib


def counted(count: int, one: str, several: str = "") -> str:
    """``1 result``, ``2 results``; ``several`` where the plural does not end in a mere s."""
    return f"{count} {one if count == 1 else several or one + 's'}"


def shown(value: object) -> str:
    """A value as it would be written, cut short."""
    return " ".join(reprlib.repr(value).split())
