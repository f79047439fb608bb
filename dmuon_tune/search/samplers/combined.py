"""``combined``, the default: what is likeliest first, then a model's choice among all and near the fastest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from . import Ints, LegalSpace, Sampler
from ._outcomes import is_ready
from .gp import GpSampler
from .local import LocalSampler

NEAR = 5  # of the fastest, whose neighbours are asked about
TURNS = 3  # of which the first asks about all, the others about neighbours


class CombinedSampler(Sampler):
    """Asked about all, the model hardly ever looks beside a summit where it expects nothing; where times are rugged,
    that is where the best ones are."""

    name = "combined"
    summary = "seeds, then a Gaussian process's choice among all and among the fastest ones' neighbours in turn"

    def __init__(self, space: LegalSpace, seed: int, first: Sequence[int] = ()) -> None:
        super().__init__(space, seed, first)
        self._model, self._climber = GpSampler(space, seed), LocalSampler(space, seed + 1)
        for part in (self._model, self._climber):
            part.times_us, part.pending = self.times_us, self.pending
        self._turn = 0

    def choose(self, unseen: Ints) -> int:
        for row in self.first:
            if row not in self.times_us and row not in self.pending and row in unseen:
                return row
        if not is_ready(self):
            return self._begin(unseen)
        asked = self._neighbours(unseen) if self._turn % TURNS else unseen
        self._turn += 1
        return self._model.best(asked)

    def _begin(self, unseen: Ints) -> int:
        """Before there is enough to learn from: random ones, in turn with a climb where something likely was known."""
        is_odd = (len(self.times_us) + len(self.pending)) % 2 == 1
        if self.first and is_odd and any(time_us is not None for time_us in self.times_us.values()):
            return self._climber.climb(unseen)
        return int(self.rng.choice(unseen))

    def _neighbours(self, unseen: Ints) -> Ints:
        """Those the fewest axes away from any of the fastest: one where such are left."""
        ok = {row: time_us for row, time_us in self.times_us.items() if time_us is not None}
        indices = self.space.indices
        away = np.min(
            [(indices[unseen] != indices[row]).sum(axis=1) for row in sorted(ok, key=ok.__getitem__)[:NEAR]], axis=0
        )
        nearest: Ints = unseen[away == away.min()]
        return nearest


SAMPLER = CombinedSampler
