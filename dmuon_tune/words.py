"""How messages put counts, values, names and tables: the right plural, one short line, aligned columns."""

from __future__ import annotations

import re
import reprlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # a compiler's log may hold what a terminal obeys


def counted(count: int, one: str, several: str = "") -> str:
    """``1 result``, ``2 results``; ``several`` where the plural does not end in a mere s."""
    return f"{count} {one if count == 1 else several or one + 's'}"


def ranks_named(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    listed = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {listed}" if len(spans) == 1 and spans[0][0] == spans[0][1] else f"ranks {listed}"


def shown(value: object) -> str:
    """A value as it would be written, cut short."""
    return " ".join(reprlib.repr(value).split())


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned columns two spaces apart; numbers to the right; None as a dash. No colour, no lines: greppable."""
    texts = [[_text(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [list(headers), *texts]) for column in range(len(headers))]
    numeric = [
        bool(rows) and all(cell is None or (isinstance(cell, int | float)) for cell in (row[column] for row in rows))
        for column in range(len(headers))
    ]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(headers), *(line(row) for row in texts)])


def name_patterns(names: Iterable[str]) -> str:
    """The names with layer numbers as ``*``; those that differ in the module's name alone joined: ``{q,k}.weight``."""
    joined: dict[tuple[str, str], list[str]] = defaultdict(list)
    for pattern in sorted({re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names}):
        path, dot, leaf = pattern.rpartition(".")
        above, _, owner = path.rpartition(".")
        joined[f"{above}." if above else "", dot + leaf].append(owner)
    return " ".join(
        f"{above}{owners[0] if len(owners) == 1 else '{' + ','.join(owners) + '}'}{leaf}"
        for (above, leaf), owners in joined.items()
    )


def _text(cell: Any) -> str:
    return "-" if cell is None else CONTROL.sub(" ", str(cell))
