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
        self._climber = LocalSampler(space, seed + 1)
        self._parts: dict[type[Sampler], Sampler] = {
            GpSampler: GpSampler(space, seed),
            LocalSampler: self._climber,
            ForestSampler: ForestSampler(space, seed + 2),
        }
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
            return self._begin(unseen)
        part = self._parts[TURNS[self._turn % len(TURNS)]]
        self._turn += 1
        return part.choose(unseen)

    def _begin(self, unseen: Ints) -> int:
        """Before there is enough to learn from: random ones, in turn with a climb where something likely was known."""
        is_odd = (len(self.times_us) + len(self.pending)) % 2 == 1
        if self.first and is_odd and any(time_us is not None for time_us in self.times_us.values()):
            return self._climber.climb(unseen)
        return int(self.rng.choice(unseen))


SAMPLER = CombinedSampler
