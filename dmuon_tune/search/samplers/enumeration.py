"""``enumeration``: one after another in the space's order, as tuners do that measure everything they are given."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from . import Ints, LegalSpace, Sampler


class EnumerationSampler(Sampler):
    name = "enumeration"
    summary = "in the order of the axes' values, as TileLang's AutoTuner goes through a grid"
    is_blind = True

    def __init__(self, space: LegalSpace, seed: int, first: Sequence[int] = ()) -> None:
        super().__init__(space, seed, first)
        order = np.lexsort(space.indices.T[::-1])  # the last axis changes fastest
        self._place = np.argsort(order)

    def choose(self, unseen: Ints) -> int:
        return int(unseen[self._place[unseen].argmin()])


SAMPLER = EnumerationSampler
