"""Rounds over kernels: likely configurations first, kernels far behind last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import Store
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.search.schedule import FAIR_TRIALS, ProblemSearch, Schedule, problem_search
from dmuon_tune.space import choice
from dmuon_tune.spec import KernelSpec


@dataclass(frozen=True)
class Config:
    place: int = choice(0, range(12))


def spec(variant: str, **more: Any) -> KernelSpec:
    return KernelSpec(
        "gram", "library", Config, lambda problem, device: None, lambda *_: None, ("dmuon_tune.space",),
        variant=variant, **more,
    )


def order(search: ProblemSearch, outcomes: dict[str, Measurement]) -> list[tuple[str, int]]:
    """(variant, place) of everything measured, one after another, each variant always ending as ``outcomes`` says."""
    measured, candidates = [], search.seeds()
    while candidates:
        for candidate in candidates:
            variant = candidate.kernel.spec.variant
            measured.append((variant, candidate.config.place))
            search.observe(candidate, outcomes[variant])
        found = search.propose()
        candidates = [found] if found else []
    return measured


@pytest.mark.parametrize("slow", [Measurement.from_samples([200.0], 0.0, {}), Measurement("compile_error")])
def test_a_kernel_far_behind_waits_until_the_others_are_done(slow: Measurement) -> None:
    fast = Measurement.from_samples([100.0], 0.0, {})
    problem, device = Problem("gram", 1, 8, 8, 8, "float32", "float32"), fingerprint("cpu")
    with Store.open("sqlite://") as store:
        search = problem_search(problem, [spec("slow"), spec("fast")], device, store, 24, 0)
        names = [variant for variant, _ in order(search, {"slow": slow, "fast": fast})]
        assert names.count("slow") == names.count("fast") == 12
        last_fast = len(names) - 1 - names[::-1].index("fast")
        assert names[:last_fast].count("slow") == FAIR_TRIALS
        near = problem_search(problem, [spec("slow"), spec("fast")], device, store, 24, 0)
        names = [variant for variant, _ in order(near, {"slow": fast, "fast": fast})]
        assert names[:12].count("slow") == 6


def test_a_kernels_own_seeds_follow_its_untuned_configuration() -> None:
    problem, device = Problem("gram", 1, 8, 8, 8, "float32", "float32"), fingerprint("cpu")
    seeded = spec("seeded", seeds=lambda problem, device: [Config(7), Config(0), Config(99), Config(3)])
    with Store.open("sqlite://") as store:
        search = problem_search(problem, [seeded], device, store, 12, 0)
        places = [place for _, place in order(search, {"seeded": Measurement.from_samples([1.0], 0.0, {})})]
    assert places[:3] == [0, 7, 3]
    assert sorted(places) == list(range(12))


def test_every_problem_gets_a_result_before_any_gets_its_second() -> None:
    problems, device = [Problem("gram", 1, m, m, 8, "float32", "float32") for m in (8, 16, 24)], fingerprint("cpu")
    with Store.open("sqlite://") as store:
        specs = [spec(""), spec("a"), spec("b")]
        searches = [problem_search(problem, specs, device, store, 24, 0) for problem in problems]
        schedule, outcome, seen = Schedule(searches), Measurement.from_samples([1.0], 0.0, {}), []
        while len(seen) < 12 and (candidate := schedule.next()) is not None:
            candidate.search.observe(candidate, outcome)
            seen.append((candidate.search.problem.m, candidate.kernel.spec.variant))
    assert [m for m, _ in seen] == [8, 16, 24] * 4
    assert {variant for _, variant in seen[:3]} == {""}, "the library's comes first"
    assert len(set(seen[:9])) == 9, "every kernel's untuned configuration comes before any other"
