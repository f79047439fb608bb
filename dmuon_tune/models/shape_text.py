"""Reads matrix shapes written by hand: ``8x2048x5464,1024x1024``."""

from __future__ import annotations

import re

from dmuon_tune.errors import UsageError
from dmuon_tune.recipe import Group

MAX_ELEMENTS = 2**32  # of one matrix: the largest embedding of any published model has fewer
MAX_BATCH = 2**20


def parse(text: str) -> list[Group]:
    """Comma-separated ``batch x rows x cols`` or ``rows x cols`` (one matrix); each distinct group once, in order."""
    groups = [_group(item.strip()) for item in text.split(",")]
    return list(dict.fromkeys(groups))


def _group(item: str) -> Group:
    extents = [_extent(part.strip(), item) for part in re.split("[xX×]", item)] if item else []
    if len(extents) not in (2, 3):
        raise UsageError(f"shape {item!r}: write rows x cols or batch x rows x cols, such as 8x2048x5464")
    batch, rows, cols = extents if len(extents) == 3 else [1, *extents]
    if rows * cols > MAX_ELEMENTS or batch > MAX_BATCH:
        raise UsageError(
            f"shape {item!r} is too large: at most {MAX_BATCH} matrices of {MAX_ELEMENTS} elements each"
        )
    return Group(batch, rows, cols)


def _extent(part: str, item: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", part):
        raise UsageError(f"shape {item!r}: {part!r} is not an integer; write it such as 8x2048x5464")
    value = int(part)
    if value < 1:
        raise UsageError(f"shape {item!r}: {value} is not positive")
    return value
