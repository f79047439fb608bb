"""``forest``: extremely randomized trees over all unseen configurations, the most promising one."""

from __future__ import annotations

from . import Ints, Sampler
from ._outcomes import is_ready, learned
from ._trees import predict

TREES = 32
SPREADS = 1.0  # of the trees' predictions that a configuration may be better than their mean


class ForestSampler(Sampler):
    name = "forest"
    summary = "lowest confidence bound of extremely randomized trees"

    def choose(self, unseen: Ints) -> int:
        if not is_ready(self):
            return int(self.rng.choice(unseen))
        rows, values = learned(self)
        points = self.space.points
        mean, spread = predict(points[rows], values, points[unseen], TREES, self.rng)
        return int(unseen[(mean - SPREADS * spread).argmin()])


SAMPLER = ForestSampler
