"""``combined``, the default: what is likeliest first, then models and a climb in turn."""

from __future__ import annotations

from collections.abc import Sequence

from . import Ints, LegalSpace, Sampler
from ._outcomes import is_ready
from .forest import ForestSampler
from .gp import GpSampler
from .local import LocalSampler

TURNS = (GpSampler, LocalSampler, GpSampler, LocalSampler, ForestSampler)


class CombinedSampler(Sampler):
    """Each part learns every outcome, whoever picked it: one part's error is another's start."""

    name = "combined"
    summary = "seeds, then a Gaussian process, a climb and a forest in turn"

    def __init__(self, space: LegalSpace, seed: int, first: Sequence[int] = ()) -> None:
        super().__init__(space, seed, first)
        self._parts = {part: part(space, seed + place) for place, part in enumerate(dict.fromkeys(TURNS))}
        self._turn = 0

    def observe(self, row: int, time_us: float | None) -> None:
        super().observe(row, time_us)
        for part in self._parts.values():
            part.observe(row, time_us)

    def choose(self, unseen: Ints) -> int:
        row = self._choose(unseen)
        for part in self._parts.values():
            part.pending.add(row)
        return row

    def _choose(self, unseen: Ints) -> int:
        for row in self.first:
            if row not in self.times_us and row not in self.pending and row in unseen:
                return row
        if not is_ready(self):
            return int(self.rng.choice(unseen))
        part = self._parts[TURNS[self._turn % len(TURNS)]]
        self._turn += 1
        return part.choose(unseen)


SAMPLER = CombinedSampler
