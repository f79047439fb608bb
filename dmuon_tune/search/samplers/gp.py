"""``gp``: a Gaussian process over all unseen configurations, the most promising one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from . import Floats, Ints, LegalSpace, Sampler
from ._outcomes import is_ready, learned

SPREADS = (2.0, 1.0)  # standard deviations that a configuration may be better than its mean: far and near in turn
STEPS = 4  # random steps of the lengths and the noise before each pick: enough, as each pick goes on from the last
STEP = 0.4  # their size, of the logarithm
LENGTH, NOISE = 0.7, 0.05  # where they start, and the prior's median: an axis is 1 long, values have deviation 1
FARTHEST = 100.0  # squared lengths: a correlation of 1e-8; much less would be denormal numbers, which are slow


class GpSampler(Sampler):
    """Matérn-5/2 with a length for each axis (ordinal, scaled to 0..1) and noise, both at their likeliest under a
    log-normal prior of deviation 1."""

    name = "gp"
    summary = "lowest confidence bound of a Gaussian process"

    def __init__(self, space: LegalSpace, seed: int, first: Sequence[int] = ()) -> None:
        super().__init__(space, seed, first)
        self._prior = np.log([LENGTH] * len(space.levels) + [NOISE])
        self._scales = self._prior
        self._spreads = itertools.cycle(SPREADS)

    def choose(self, unseen: Ints) -> int:
        if not is_ready(self):
            return int(self.rng.choice(unseen))
        rows, values = learned(self)
        values = (values - values.mean()) / max(float(values.std()), 1e-9)
        known, asked = self.space.points[rows], self.space.points[unseen]
        factor = self._fit(known, values)
        lengths = np.exp(self._scales[:-1])
        whiten = np.linalg.inv(factor)  # and a product: several times faster than to solve for so many columns
        across, white = whiten @ _matern(known / lengths, asked / lengths), whiten @ values
        variance = (white @ white) / len(values) * np.maximum(1 - (across**2).sum(axis=0), 0)
        return int(unseen[(white @ across - next(self._spreads) * np.sqrt(variance)).argmin()])

    def _fit(self, known: Floats, values: Floats) -> Floats:
        """Improve the lengths and the noise; the Cholesky factor of the known values' correlation under them."""
        best, factor = self._loss(known, values, self._scales)
        for _ in range(STEPS):
            moved = self.rng.random(len(self._scales)) < STEP
            tried = self._scales + STEP * moved * self.rng.normal(size=len(moved))
            loss, tried_factor = self._loss(known, values, tried)
            if loss < best:
                best, factor, self._scales = loss, tried_factor, tried
        return factor

    def _loss(self, known: Floats, values: Floats, scales: Floats) -> tuple[float, Floats]:
        """Negative log posterior with the values' variance at its likeliest, and the Cholesky factor."""
        scaled = known / np.exp(scales[:-1])
        factor = np.linalg.cholesky(_matern(scaled, scaled) + np.exp(2 * scales[-1]) * np.eye(len(known)))
        white = np.linalg.solve(factor, values)
        likelihood = 0.5 * len(values) * np.log(max(float(white @ white), 1e-300)) + np.log(np.diag(factor)).sum()
        return float(likelihood + 0.5 * ((scales - self._prior) ** 2).sum()), factor


def _matern(points: Floats, others: Floats) -> Floats:
    """Matérn-5/2 correlation (points, others)."""
    squares = (points**2).sum(axis=1)[:, None] + (others**2).sum(axis=1) - 2 * points @ others.T
    far = np.sqrt(5 * np.clip(squares, 0, FARTHEST))
    correlation: Floats = (1 + far + far**2 / 3) * np.exp(-far)
    return correlation


SAMPLER = GpSampler
