"""Prints results: plain aligned tables or JSON on stdout, everything else on stderr."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from typing import Any


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


def microseconds(value: float | None) -> str | None:
    """Four significant digits, no exponent; None stays None."""
    if value is None:
        return None
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def ratio(baseline: float | None, value: float | None) -> str | None:
    """How many times faster ``value`` is than ``baseline``, such as ``1.24x``."""
    return None if not baseline or not value else f"{baseline / value:.2f}x"


def config_text(config: dict[str, Any]) -> str:
    """``key=value`` pairs in field order."""
    return " ".join(f"{name}={value}" for name, value in config.items())


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def note(text: str) -> None:
    """Information for a person: stderr, one line."""
    print(f"dmuon-tune: {text}", file=sys.stderr)


def warn(text: str) -> None:
    note(f"warning: {text}")


def _text(cell: Any) -> str:
    return "-" if cell is None else str(cell)


class LogLines(logging.Handler):
    """The library's log records (such as an unreadable cache layer) as the command line's own lines."""

    def emit(self, record: logging.LogRecord) -> None:
        note(f"{record.levelname.lower()}: {record.getMessage()}")
