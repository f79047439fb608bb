"""The search for restarts: exhaustive enumeration finds nothing better, and published choices come out."""

from __future__ import annotations

from itertools import combinations

import pytest

from dmuon_tune.coefficients import COEFFICIENTS, CoefficientSet, coefficient_set
from dmuon_tune.errors import UsageError
from dmuon_tune.recipe import DEFAULT_RESTARTS, DEFAULT_STEPS
from dmuon_tune.restarts import MOST_GROWTH, PERTURBATION, best_restarts, choose_restarts


def growth(triples: tuple[tuple[float, float, float], ...], restarts: tuple[int, ...], x: float) -> float:
    """The largest |Q| of one singular value, as the definition says."""
    worst, q, r = 0.0, 1.0, x * x + PERTURBATION
    for step, (a, b, c) in enumerate(triples):
        if step in restarts:
            x, q = q * x, 1.0
            r = x * x + PERTURBATION
        z = a + b * r + c * r * r
        q, r = q * z, r * z * z
        worst = max(worst, abs(q))
    return worst


@pytest.mark.parametrize("name", ["jordan", "you", "polar-express-1.02", "polar-express-1.05"])
def test_the_published_restart_comes_out(name: str) -> None:
    """Dao-AILab/gram-newton-schulz publishes step 2 for five steps, which is what is tuned for by default too."""
    assert choose_restarts(COEFFICIENTS[name], DEFAULT_STEPS) == (2,) == DEFAULT_RESTARTS


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("given", [COEFFICIENTS["jordan"], coefficient_set([(1.9, -1.3, 0.4)] * 4 + [(3.0, -3.0, 1)])])
def test_no_other_places_grow_less(given: CoefficientSet, count: int) -> None:
    triples = given.take(5)
    found = best_restarts(triples, count)
    assert found is not None and len(found[0]) == count
    values = [10 ** (-6 * i / 199) for i in range(200)]
    worst = {places: max(growth(triples, places, x) for x in values) for places in combinations(range(1, 5), count)}
    assert worst[found[0]] <= 1.001 * min(worst.values()) and worst[found[0]] <= 1.001 * found[1]


def test_a_set_without_room_gets_two_restarts() -> None:
    assert choose_restarts(COEFFICIENTS["polar-express-1.01"], 5) == (1, 3)


@pytest.mark.parametrize("steps", [1, 2, 4, 6, 7, 10])
def test_as_few_as_stay_below_the_limit(steps: int) -> None:
    triples = COEFFICIENTS["jordan"].take(steps)
    chosen = choose_restarts(COEFFICIENTS["jordan"], steps)
    best = best_restarts(triples, len(chosen))
    assert best is not None and best[1] < MOST_GROWTH
    if chosen:
        assert best_restarts(triples, len(chosen) - 1, below=MOST_GROWTH) is None


def test_where_nothing_helps_every_step_is_a_restart() -> None:
    assert choose_restarts(coefficient_set([(500.0, 0.0, 0.0)] * 3), 3) == (1, 2)


def test_so_many_steps_that_the_search_would_not_end_are_refused() -> None:
    with pytest.raises(UsageError, match="steps must be at most 1000, not 1000000"):
        COEFFICIENTS["jordan"].take(10**6)
