"""``gp``: a Gaussian process over all unseen configurations, the one of the largest expected improvement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import Floats, Ints, LegalSpace, Sampler
from ._features import features
from ._outcomes import is_ready, learned

STEPS = 4  # along the gradient before each pick: enough, as each pick goes on from the last
LENGTH, NOISE = 1.2, 0.05  # where they start, and the prior's median: a feature is 1 long, values have deviation 1
FIRST_STEP, NEXT_STEP, SHORTEST_STEP, LONGEST_STEP = 0.1, 0.02, 1e-3, 1.0  # of the logarithm; the least of a next pick
LONGER, SHORTER = 1.5, 0.5  # a step after its slope kept its sign, and after it changed it
WIDEST = 5.0  # deviations of the prior that a length may lie from its median
RUGGED = 2.0  # of the noise's variance, which an unseen one has too: that is ruggedness, as times repeat
LEAST_NOISE = 1e-6  # of the variance, so that the matrix stays positive definite
FARTHEST = 100.0  # squared lengths: a correlation of 1e-8; much less would be denormal numbers, which are slow
_erfc = np.vectorize(math.erfc, otypes=[np.float64])


class GpSampler(Sampler):
    """Matérn-5/2 with a length for each feature and noise, all at their likeliest under a log-normal prior of
    deviation 1."""

    name = "gp"
    summary = "largest expected improvement of a Gaussian process"

    def __init__(self, space: LegalSpace, seed: int, first: Sequence[int] = ()) -> None:
        super().__init__(space, seed, first)
        self._features = features(space)
        self._prior = np.log([LENGTH] * self._features.shape[1] + [NOISE])
        self._scales, self._steps = self._prior, np.full(len(self._prior), FIRST_STEP)

    def choose(self, unseen: Ints) -> int:
        return self.best(unseen) if is_ready(self) else int(self.rng.choice(unseen))

    def best(self, asked: Ints) -> int:
        """Of these rows, wherever at least one outcome is ok."""
        return int(asked[self._expected(asked).argmax()])

    def _expected(self, asked: Ints) -> Floats:
        """How much each of these rows is expected to gain on the fastest, in deviations of what is known."""
        rows, values = learned(self)
        values = (values - values.mean()) / max(float(values.std()), 1e-9)
        known, unknown = self._features[rows], self._features[asked]
        fit = self._fit(known, values)
        lengths = np.exp(self._scales[:-1])
        across, _ = _matern(known / lengths, unknown / lengths)
        mean = fit.weights @ across
        share = np.maximum(1 - ((fit.whiten @ across) ** 2).sum(axis=0), 1e-12)  # of the variance that is unexplained
        share += RUGGED * np.exp(2 * self._scales[-1])
        return _improvement(values.min() - mean, np.sqrt(fit.variance * share))

    def _fit(self, known: Floats, values: Floats) -> _Fit:
        """Improve the lengths and the noise by the signs of their slopes (Rprop); the process under them."""
        fit, slopes = self._under(self._scales, known, values)
        for _ in range(STEPS):
            scales = np.clip(self._scales - self._steps * np.sign(slopes), self._prior - WIDEST, self._prior + WIDEST)
            tried, tried_slopes = self._under(scales, known, values)
            if tried.loss < fit.loss:
                self._steps *= np.where(tried_slopes * slopes > 0, LONGER, SHORTER)
                self._scales, fit, slopes = scales, tried, tried_slopes
            else:
                self._steps *= SHORTER
            self._steps = np.clip(self._steps, SHORTEST_STEP, LONGEST_STEP)
        self._steps = np.maximum(self._steps, NEXT_STEP)
        return fit

    def _under(self, scales: Floats, known: Floats, values: Floats) -> tuple[_Fit, Floats]:
        """The process under these lengths and noise, the variance at its likeliest, and its loss's slopes."""
        count, scaled, noise = len(values), known / np.exp(scales[:-1]), np.exp(2 * scales[-1])
        correlation, slope = _matern(scaled, scaled)
        factor = np.linalg.cholesky(correlation + (noise + LEAST_NOISE) * np.eye(count))
        whiten = np.linalg.inv(factor)  # and products: several times faster than to solve for so many columns
        inverse = whiten.T @ whiten
        weights = inverse @ values
        power, off = float(values @ weights) or LEAST_NOISE, scales - self._prior
        loss = 0.5 * count * np.log(power) + np.log(np.diag(factor)).sum() + 0.5 * (off**2).sum()
        pull = 0.5 * (inverse - count / power * np.outer(weights, weights))  # of each correlation on the loss
        by_length = pull * slope
        slopes = 2 * (by_length.sum(axis=1) @ scaled**2 - (scaled * (by_length @ scaled)).sum(axis=0))
        return _Fit(float(loss), whiten, weights, power / count), np.append(slopes, 2 * noise * np.trace(pull)) + off


@dataclass(frozen=True)
class _Fit:
    """Negative log posterior; the factor's inverse; what each known value weighs at its correlation; the variance."""

    loss: float
    whiten: Floats
    weights: Floats
    variance: float


def _improvement(gain: Floats, spread: Floats) -> Floats:
    """How much is expected to be gained where ``gain`` is the mean and ``spread`` the deviation, losses not counted."""
    away = gain / spread
    chance, density = 0.5 * _erfc(-away / math.sqrt(2)), np.exp(-(away**2) / 2) / math.sqrt(2 * math.pi)
    expected: Floats = spread * (away * chance + density)
    return expected


def _matern(points: Floats, others: Floats) -> tuple[Floats, Floats]:
    """Matérn-5/2 correlation (points, others), and its slope by the logarithm of a length, over that feature's squared
    distance."""
    squares = (points**2).sum(axis=1)[:, None] + (others**2).sum(axis=1) - 2 * points @ others.T
    far = np.sqrt(5 * np.clip(squares, 0, FARTHEST))
    decay = np.exp(-far)
    return (1 + far + far**2 / 3) * decay, 5 / 3 * (1 + far) * decay


SAMPLER = GpSampler
