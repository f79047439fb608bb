"""The samplers on whole spaces that were measured on a GPU, ``data/``: how near to the best they come, and how soon."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dmuon_tune.search.record import Record
from dmuon_tune.search.replay import NEAR, Curve, replay

FILES = sorted(Path(__file__).with_name("data").glob("*.json.gz"))
EVALUATIONS, SEEDS = 60, 20  # the goal is a hundred
PART = 0.25  # of a space that the evaluations may be: what measures most of a small one finds the best in any case
WORKERS = 12  # that compile beside the one that times, as on the GPU's host
FEWER_SEEDS = 5  # of Optuna, which takes five times as long


@pytest.fixture(scope="module", params=FILES, ids=[path.name.partition(".")[0] for path in FILES])
def curves(request: pytest.FixtureRequest) -> dict[str, Curve]:
    record = Record.read(request.param)
    evaluations = min(EVALUATIONS, int(PART * len(record.rows)))
    found = replay([record], ["combined", "random", "enumeration"], evaluations, SEEDS, WORKERS)
    return {curve.sampler: curve for curve in [*found, *replay([record], ["tpe"], evaluations, FEWER_SEEDS, WORKERS)]}


def test_the_default_comes_near_the_best_in_sixty_evaluations(curves: dict[str, Curve]) -> None:
    ours = curves["combined"]
    median, worst_decile, _ = ours.at(ours.fractions.shape[1])
    assert median >= 0.98 and worst_decile >= 0.95, (median, worst_decile)


@pytest.mark.parametrize("other", ["random", "tpe"])
def test_the_default_is_near_the_best_in_fewer_evaluations(curves: dict[str, Curve], other: str) -> None:
    ours, theirs = (curves[name].evaluations_to(NEAR) or math.inf for name in ("combined", other))
    assert ours < theirs


def test_the_default_is_near_the_best_sooner_than_who_enumerates(curves: dict[str, Curve]) -> None:
    ours_s, theirs_s = (curves[name].seconds_to(NEAR) for name in ("combined", "enumeration"))
    if curves["combined"].record.kernel.startswith("chain."):
        assert ours_s is theirs_s is None  # how long a chain compiles depends on the chains before it
    else:
        assert ours_s is not None and theirs_s is not None and ours_s < theirs_s


def test_the_files_are_small_and_of_a_kernel_and_a_chain() -> None:
    assert sum(path.stat().st_size for path in FILES) < 2_000_000
    assert {Record.read(path).kernel.partition(".")[0] for path in FILES} == {"gram", "chain"}
