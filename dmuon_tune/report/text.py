"""How the report writes numbers, configurations and text that comes from a cache."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from dmuon_tune.recipe import Recipe


def plain(text: str, longest: int) -> str:
    """One line without control characters, cut with an ellipsis after ``longest`` characters (0: never)."""
    clean = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return clean if len(clean) <= longest or not longest else clean[: longest - 1] + "…"


def microseconds(value: float | None) -> str:
    """Four significant digits, thousands apart, no exponent."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def times(value: float | None) -> str:
    """A speed-up: ``1.24×``."""
    return "–" if value is None else f"{value:.2f}×"


def scaled(value: float | None, unit: str) -> str:
    """Three significant digits with a prefix: ``752 TFLOP/s``."""
    if value is None:
        return "–"
    size, prefix = next(((s, p) for s, p in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= s), (1.0, ""))
    digits = value / size
    return f"{digits:,.0f} {prefix}{unit}" if digits >= 100 else f"{digits:.3g} {prefix}{unit}"


def config_text(config: dict[str, Any]) -> str:
    """``key=value`` pairs in field order."""
    return " ".join(f"{name}={value}" for name, value in config.items())


def pieces_text(recipe: Recipe) -> str:
    """How a batch is cut: ``2×8`` for two pieces of eight."""
    if len(recipe.pieces) == 1:
        return "at once"
    return " + ".join(f"{count}×{size}" for size, count in Counter(recipe.pieces).items())


def binary_bytes(count: int) -> str:
    """Bytes in KiB, MiB or GiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.4g} {unit}"
    return f"{count} B"


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Over what is known; None where nothing is."""
    known = [value for value in values if value]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else None
