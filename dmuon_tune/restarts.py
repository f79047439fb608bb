"""Chooses where the Gram form returns to X: the restarts by which a rounding error of R grows least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from .checks import integer
from .coefficients import CoefficientSet, Triple

# The method of github.com/Dao-AILab/gram-newton-schulz, stability/restart_autotune.py: each eigenvalue x² of XXᵀ is
# shifted by the most negative eigenvalue that half precision gives it, and the largest |Q| on the way is the growth.
PERTURBATION = -4e-4
SINGULAR_VALUES, SMALLEST = 1000, 1e-6  # below, the shift alone is left of x² + shift
# The published sets of five steps reach 31 to 45 with the one restart published for them; 283 and more where one is too
# few for a set (polar-express-1.01 leaves no room: a perturbed singular value passes its polynomials' range).
MOST_GROWTH = 100.0


def best_restarts(
    triples: Sequence[Triple], count: int, perturbation: float = PERTURBATION, norm_factor: float = 1.0,
    below: float = math.inf,
) -> tuple[tuple[int, ...], float] | None:
    """(The ``count`` restarts of least growth, that growth), of equals the earlier ones; None where none is ``below``.

    The growth is the largest |Q| of the Gram form on a perturbed R, over all singular values and steps; each restart,
    X ← QX and R = XXᵀ before its step (from 0), perturbs R again. An infinite growth is never the least.
    """
    least, found = below, None

    def from_restart(begin: int, values: list[float], worst: float, chosen: tuple[int, ...]) -> None:
        """Every way on from X of these singular values at step ``begin``."""
        nonlocal least, found
        q, r = [1.0] * len(values), [x * x + perturbation for x in values]
        for step in range(begin, len(triples)):
            a, b, c = triples[step]
            z = [(c * value + b) * value + a for value in r]
            q = [value * factor for value, factor in zip(q, z, strict=True)]
            r = [value * factor * factor for value, factor in zip(r, z, strict=True)]
            worst = max(worst, *map(abs, q))
            if not (worst < least and all(map(math.isfinite, q))):
                return
            if len(chosen) < count and step + 1 < len(triples):
                moved = [x * value for x, value in zip(values, q, strict=True)]
                from_restart(step + 1, moved, worst, (*chosen, step + 1))
        if len(chosen) == count:
            least, found = worst, chosen

    start = [SMALLEST ** (index / (SINGULAR_VALUES - 1)) / norm_factor for index in range(SINGULAR_VALUES)]
    from_restart(0, start, 0.0, ())
    return None if found is None else (found, least)


def choose_restarts(
    coefficients: CoefficientSet, steps: int, perturbation: float = PERTURBATION
) -> tuple[int, ...]:
    """As few restarts as keep the growth below MOST_GROWTH, at their best places; remembered for every set.

    Where no number of restarts does, every step is one.
    """
    integer("steps", steps)
    return _chosen(coefficients.take(steps), coefficients.norm_factor, perturbation)


@cache
def _chosen(triples: tuple[Triple, ...], norm_factor: float, perturbation: float) -> tuple[int, ...]:
    for count in range(len(triples)):
        best = best_restarts(triples, count, perturbation, norm_factor, below=MOST_GROWTH)
        if best is not None:
            return best[0]
    return tuple(range(1, len(triples)))
