"""``local``: an unseen configuration next to the fastest so far, the fewest axes away."""

from __future__ import annotations

from . import Ints, Sampler
from ._outcomes import is_ready


class LocalSampler(Sampler):
    """Of those the fewest axes away the one with the shortest steps, ties at random. It climbs, and once a summit's
    surroundings are all seen it goes farther."""

    name = "local"
    summary = "the nearest unseen to the fastest so far"

    def choose(self, unseen: Ints) -> int:
        return self.climb(unseen) if is_ready(self) else int(self.rng.choice(unseen))

    def climb(self, unseen: Ints) -> int:
        """The same wherever at least one outcome is ok."""
        fastest = min((row for row, time in self.times_us.items() if time is not None), key=self._time_us)
        indices, points = self.space.indices, self.space.points
        axes_away = (indices[unseen] != indices[fastest]).sum(axis=1)
        steps = ((points[unseen] - points[fastest]) ** 2).sum(axis=1)
        return int(unseen[(axes_away + steps + LUCK * self.rng.random(len(unseen))).argmin()])

    def _time_us(self, row: int) -> float:
        return self.times_us[row] or 0.0


LUCK = 0.3  # of an axis: which of several near ones comes first
SAMPLER = LocalSampler
