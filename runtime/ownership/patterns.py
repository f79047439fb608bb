"""The most valuable pattern (counts of one owner) within a time limit: a knapsack over batches of each class."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GRID = 2000  # parts that a time limit is divided into
ROUNDING = 1e-9  # of float64 in the division

Pattern = tuple[int, ...]  # matrices of each class on one owner


@dataclass(frozen=True)
class Pricing:
    """Patterns of at most ``limit_us``, times in parts of it: rounded up no pattern is longer than the limit, rounded
    down none within the limit is left out."""

    sizes: tuple[NDArray[np.int64], ...]  # of each class: batch sizes, from 0
    parts: tuple[NDArray[np.int64], ...]  # and their times
    limit_us: float

    @classmethod
    def of(cls, table: NDArray[np.float64], limit_us: float, round_up: bool) -> Pricing:
        """``table`` as of an Instance. Of batches that take no less than a larger one only the largest is kept."""
        exact = np.minimum(table / limit_us, 2.0) * GRID
        rounded = (np.ceil(exact - ROUNDING) if round_up else np.floor(exact + ROUNDING)).astype(np.int64)
        sizes, parts = [], []
        for row in rounded:
            larger = np.minimum.accumulate(np.append(row[1:], GRID + 1)[::-1])[::-1]
            kept = np.flatnonzero(row < larger)
            sizes.append(kept)
            parts.append(row[kept])
        return cls(tuple(sizes), tuple(parts), limit_us)

    def best(self, values: NDArray[np.float64]) -> tuple[NDArray[np.float64], Pattern]:
        """(The most value within every part of the limit, from 0 to all of it, a pattern of the most value in all), for
        a matrix of class s being worth ``values[s]`` ≥ 0."""
        stages = [np.zeros(GRID + 1)]
        worth = np.empty(GRID + 1)
        for sizes, parts, value in zip(self.sizes, self.parts, values, strict=True):
            before, most = stages[-1], stages[-1].copy()
            if value > 0:
                for size, part in zip(sizes[1:].tolist(), parts[1:].tolist(), strict=True):
                    fits = worth[: GRID + 1 - part]
                    np.add(before[: GRID + 1 - part], size * value, out=fits)
                    np.maximum(most[part:], fits, out=most[part:])
            stages.append(most)
        return stages[-1], self._trace(stages, values)

    def _trace(self, stages: list[NDArray[np.float64]], values: NDArray[np.float64]) -> Pattern:
        """The pattern behind the last stage's end: what the stage before is worth with it is what the stage is."""
        place, pattern = GRID, []
        for kind in reversed(range(len(self.sizes))):
            sizes, parts = self.sizes[kind], self.parts[kind]
            fitting = parts <= place
            worth = stages[kind][place - parts[fitting]] + sizes[fitting] * values[kind]
            chosen = int(np.argmax(worth))
            pattern.append(int(sizes[chosen]))
            place -= int(parts[chosen])
        return tuple(reversed(pattern))
