"""``forest``: extremely randomized trees over all unseen configurations, the most promising one."""

from __future__ import annotations

from collections.abc import Sequence

from . import Ints, LegalSpace, Sampler
from ._features import features
from ._outcomes import is_ready, learned
from ._trees import predict

TREES = 32
SPREADS = 1.0  # of the trees' predictions that a configuration may be better than their mean


class ForestSampler(Sampler):
    name = "forest"
    summary = "lowest confidence bound of extremely randomized trees"

    def __init__(self, space: LegalSpace, seed: int, first: Sequence[int] = ()) -> None:
        super().__init__(space, seed, first)
        self._features = features(space)

    def choose(self, unseen: Ints) -> int:
        if not is_ready(self):
            return int(self.rng.choice(unseen))
        rows, values = learned(self)
        mean, spread = predict(self._features[rows], values, self._features[unseen], TREES, self.rng)
        return int(unseen[(mean - SPREADS * spread).argmin()])


SAMPLER = ForestSampler
