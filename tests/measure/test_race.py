"""Races of finalists: who is dropped, what a tie is, and what a failing entrant costs, with real workers."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dmuon_tune.measure import race
from dmuon_tune.measure.executor import Executor
from dmuon_tune.measure.job import AnyJob, Entrant, Outcome, RaceJob, RaceResult
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem

PROBLEM = Problem("gram", 3, 33, 33, 70, "float32", "float32")


def entrant(kernel: str, **config: Any) -> Entrant:
    return Entrant(kernel, config, 4)


LIBRARY = 2 * [entrant("gram.library", entry="baddbmm")]


def run(executor: Executor, *entrants: Entrant, prepare_s: float = 60.0) -> tuple[AnyJob, Outcome]:
    ((job, outcome),) = executor.run([RaceJob(PROBLEM, entrants, "cpu", 1, prepare_s)])
    return job, outcome


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=60), st.randoms())
def test_an_interval_holds_the_median_and_needs_eight_to_say_anything(ratios: list[float], rng: random.Random) -> None:
    low, high = race.interval(ratios)
    assert low <= sorted(ratios)[len(ratios) // 2] <= high
    assert (low, high) == race.interval(rng.sample(ratios, len(ratios)))
    assert (low > 0.0) == (len(ratios) >= race.FEWEST_ROUNDS)


def rounds_of(times: dict[int, list[float]]) -> list[dict[int, float]]:
    return [dict(zip(times, each, strict=True)) for each in zip(*times.values(), strict=True)]


def test_only_what_is_slower_beyond_noise_is_dropped() -> None:
    drift = [10.0, 12.0, 9.0, 15.0, 11.0, 10.0, 13.0, 9.5]  # the machine's, the same for all in a round
    times = {
        0: drift,
        1: [each * 1.05 for each in drift],  # apart in every round, though the drift is larger
        2: [each * factor for each, factor in zip(drift, [0.98, 1.05] * 4, strict=True)],  # now faster, now slower
        3: [each * 1.001 for each in drift],  # slower in every round, by nothing that matters
    }
    assert race.standing(rounds_of(times)[:5], {0, 1, 2, 3}) == ({0, 1, 2, 3}, {0, 1, 2, 3})
    assert race.standing(rounds_of(times), {0, 1, 2, 3}) == ({0, 2, 3}, {0, 2, 3})
    del times[2]
    assert race.standing(rounds_of(times), {0, 1, 3}) == ({0}, {0, 3})


@given(st.lists(st.floats(50.0, 200.0), min_size=9, max_size=30), st.floats(1.02, 3.0), st.integers(8, 20))
def test_what_was_dropped_stays_slower_than_what_it_lost_to(drift: list[float], factor: float, left: int) -> None:
    rounds = [{0: each, 1: each * factor} if turn < left else {0: each} for turn, each in enumerate(drift)]
    times = race.paired(rounds)
    own = [each[1] for each in rounds if 1 in each]
    assert times[0] == drift and len(times[1]) == len(own) == min(left, len(drift))
    assert all(time >= each for time, each in zip(times[1], own, strict=True)), "never below what was measured"
    assert statistics.median(times[1]) > 0.999 * factor * statistics.median(drift)
    if left >= len(drift):
        assert times[1] == own


@pytest.mark.parametrize("disturbed", [0, 3, 1000])
def test_disturbed_rounds_are_run_again_but_not_for_ever(disturbed: int) -> None:
    order: list[list[int]] = []

    def windows(racing: list[int]) -> tuple[dict[int, float], bool]:
        order.append(racing)
        noise = random.Random(len(order)).uniform(0.9, 1.1)
        return {place: noise * (1.0 + place) for place in racing}, len(order) > disturbed

    counted, is_disturbed, tied = race._rounds({0, 1, 2}, windows, random.Random(0), lambda: None)
    assert tied == {0} and is_disturbed == (disturbed == 1000)
    assert len(counted) == (2 * race.ROUNDS if disturbed == 1000 else race.FEWEST_ROUNDS)
    assert len(order) == len(counted) + (disturbed if disturbed == 3 else 0)
    assert len({tuple(each) for each in order if len(each) == 3}) > 2


def test_a_race_times_what_is_right_and_says_how_the_others_failed(test_kernels: None) -> None:
    bad = [entrant(f"gram.library.bad_{name}") for name in ("compile", "values", "launch", "slow")]
    with Executor("cpu") as executor:
        _, outcome = run(executor, *LIBRARY, *bad)
    assert isinstance(outcome, RaceResult)
    statuses = [measurement and measurement.status for measurement in outcome.measurements]
    assert statuses == ["ok", "ok", "compile_error", "wrong_result", "launch_error", "ok"]
    slow = outcome.measurements[-1]
    fast = [found for found in outcome.measurements[:2] if found is not None]
    assert slow is not None and not slow.resources["race"]["tied"] and (slow.median_us or 0) > 3000
    assert (slow.median_us or 0) > min(found.median_us or 0 for found in fast)
    assert any(found.resources["race"]["tied"] for found in fast)
    assert all(found.resources["race"]["windows"] == len(found.samples) >= race.FEWEST_ROUNDS for found in fast)


@pytest.mark.parametrize("failing", [
    {"bad_exit": "crashed", "bad_kill": "crashed", "bad_hang": "timeout"},
    {"late_exit": "crashed", "late_hang": "timeout", "late_raise": "launch_error"},  # in a timed round
])
def test_an_entrant_that_ends_a_race_is_named_and_the_next_race_runs(
    test_kernels: None, failing: dict[str, str]
) -> None:
    with Executor("cpu", run_timeout_s=5) as executor:
        for place, (name, status) in enumerate(failing.items()):
            _, outcome = run(executor, *LIBRARY[:place], entrant(f"gram.library.{name}"), LIBRARY[-1])
            assert isinstance(outcome, Measurement)
            assert (outcome.status, outcome.resources) == (status, {"entrant": place})
        _, outcome = run(executor, *LIBRARY, entrant("gram.library.bad_slow"), prepare_s=0.0)
    assert isinstance(outcome, RaceResult)
    assert [found is not None for found in outcome.measurements] == [True, True, False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_a_race_step_by_step_names_what_one_at_full_speed_does_not(test_kernels: None) -> None:
    job = RaceJob(PROBLEM, (*LIBRARY, Entrant("gram.library.gpu_late", {}, 40)), "cuda", 1, 60.0)
    with Executor("cuda") as executor:
        for stepwise, resources in ((False, {}), (True, {"entrant": 2})):
            ((_, outcome),) = executor.run([replace(job, stepwise=stepwise)])
            assert isinstance(outcome, Measurement)
            assert (outcome.status, outcome.resources) == ("launch_error", resources), outcome.log
        ((_, outcome),) = executor.run([replace(job, entrants=job.entrants[:2], stepwise=True)])
    assert isinstance(outcome, RaceResult)
    assert [found and found.status for found in outcome.measurements] == ["ok", "ok"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_windows_of_unlike_lengths_race_over_many_small_buffers() -> None:
    small = Problem("gram", 2, 64, 64, 64)
    entrants = tuple(Entrant("gram.library", {"entry": "baddbmm"}, launches) for launches in (50, 200, 400))
    with Executor("cuda") as executor:
        ((_, outcome),) = executor.run([RaceJob(small, entrants, "cuda", 1, 60.0)])
    assert isinstance(outcome, RaceResult)
    assert [found and (found.status, found.resources["rotating_sets"]) for found in outcome.measurements] == 3 * [
        ("ok", 400)
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_an_entrant_whose_launches_differ_is_a_wrong_result_and_the_others_race(test_kernels: None) -> None:
    entrants = (*LIBRARY, Entrant("gram.library.gpu_rare", {}, 40))
    with Executor("cuda") as executor:
        ((_, outcome),) = executor.run([RaceJob(PROBLEM, entrants, "cuda", 1, 60.0)])
    assert isinstance(outcome, RaceResult)
    assert [found and found.status for found in outcome.measurements] == ["ok", "ok", "wrong_result"]
    assert outcome.measurements[-1] is not None and "inputs differ" in outcome.measurements[-1].log
