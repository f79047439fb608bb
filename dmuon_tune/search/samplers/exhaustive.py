"""``exhaustive``: everything, what is likeliest first, then each time what lies farthest from all before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from . import Ints, LegalSpace, Sampler


class ExhaustiveSampler(Sampler):
    """Any part of the order is spread over the space, so a run may be ended anywhere; no outcome changes it."""

    name = "exhaustive"
    summary = "seeds, then the farthest from all before: to measure a space whole"

    def __init__(self, space: LegalSpace, seed: int, first: Sequence[int] = ()) -> None:
        super().__init__(space, seed, first)
        self._gaps = np.full(len(space), np.inf)  # squared distance to the nearest one that was taken
        self._taken: set[int] = set()

    def observe(self, row: int, time_us: float | None) -> None:
        super().observe(row, time_us)
        self._take(row)

    def choose(self, unseen: Ints) -> int:
        row = next((row for row in self.first if row not in self._taken and row in unseen), None)
        if row is None:
            gaps = self._gaps[unseen]
            row = int(self.rng.choice(unseen[gaps == gaps.max()]))
        self._take(row)
        return row

    def _take(self, row: int) -> None:
        if row not in self._taken:
            self._taken.add(row)
            offsets = self.space.points - self.space.points[row]
            self._gaps = np.minimum(self._gaps, (offsets**2).sum(axis=1))


SAMPLER = ExhaustiveSampler
