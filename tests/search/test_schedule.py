"""Rounds over kernels: likely configurations first, kernels far behind last."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import Layers, Store, TuningKey
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernels
from dmuon_tune.measure import untuned
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.search.ends import EndSearch
from dmuon_tune.search.kernel_search import How, KernelSearch, kernel_searches
from dmuon_tune.search.neighbours import Neighbours
from dmuon_tune.search.problem_search import FAIR_TRIALS, Candidate, ProblemSearch, problem_search
from dmuon_tune.search.schedule import Schedule
from dmuon_tune.space import choice
from dmuon_tune.spec import KernelSpec

H200 = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 62914560, 150_000_000_000)
OK = Measurement.from_samples([1.0], 0.0, {})


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


@dataclass(frozen=True)
class WideConfig:
    place: int = choice(0, range(60))


def test_the_more_a_kernel_has_had_the_closer_it_must_be_to_get_more() -> None:
    """Of ten configurations the best may hide a sixth, of thirty a twentieth."""
    problem, device = Problem("gram", 1, 8, 8, 8, "float32", "float32"), fingerprint("cpu")
    times_us = {"fast": 100.0, "near": 103.0, "behind": 115.0}
    wide = [replace(spec(variant), Config=WideConfig) for variant in times_us]
    outcomes = {variant: Measurement.from_samples([time_us], 0.0, {}) for variant, time_us in times_us.items()}
    with Store.open("sqlite://") as store:
        names = [variant for variant, _ in order(problem_search(problem, wide, device, store, 90, 0), outcomes)]
    counts = Counter(names)
    assert 10 < counts["behind"] < 15 and abs(counts["near"] - counts["fast"]) <= 1


def test_what_is_the_fastest_for_a_sibling_is_tried_early_and_once() -> None:
    problems, device = [Problem("gram", 1, m, m, 8, "float32", "float32") for m in (8, 16, 64)], fingerprint("cpu")
    with Store.open("sqlite://") as store:
        wide = [replace(spec(""), Config=WideConfig)]
        near, search, far = (problem_search(problem, wide, device, store, 12, 0) for problem in problems)
        for sibling, place in ((near, 41), (far, 59)):
            for candidate in sibling.seeds():
                sibling.observe(candidate, OK)
            best = Candidate(sibling, sibling.kernels[0], WideConfig(place))
            sibling.observe(best, Measurement.from_samples([0.5], 0.0, {}))
        search.siblings = [near, far]
        places = [place for _, place in order(search, {"": OK})]
    assert len(places) == 12 == len(set(places))
    assert 41 in places[:4] and 59 in places[:7] and places.index(41) < places.index(59)


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


@pytest.mark.parametrize("op", ["gram", "gemm_symmetric", "apply"])
@pytest.mark.parametrize("m", [128, 1024, 4096])
def test_first_comes_what_training_runs_untuned_then_the_library(op: str, m: int) -> None:
    """A run that ends early may leave one result alone, which is the winner then."""
    problem = Problem(op, 2, m, m, m if op != "gram" else 4 * m, "float16", "float16")
    specs = [each for each in kernels(op) if each.backend != "quack"]  # which is not installed here
    with Store.open("sqlite://") as store:
        first, second, *_ = problem_search(problem, specs, H200, store, 24, 0).seeds()
    assert (first.kernel.spec, first.config) == untuned.choice(problem, specs, H200)
    names = [first.kernel.spec.name, second.kernel.spec.name]
    assert f"{op}.library" in names and (names[0] != f"{op}.library" or m == 128)


def test_a_kernel_that_is_not_ready_waits_and_its_problem_with_it() -> None:
    problems, device = [Problem("gram", 1, m, m, 8, "float32", "float32") for m in (8, 16)], fingerprint("cpu")
    other = KernelSpec("gram", "other", Config, lambda *_: None, lambda *_: None, ("dmuon_tune.space",))
    with Store.open("sqlite://") as store:
        how = How(Neighbours(store, device))
        searches = []
        for problem, specs in zip(problems, ([spec(""), other], [spec("")]), strict=True):
            key = tuning_key(spec(""), problem, device)
            legal = other.legal_space(problem, device)
            found = [
                KernelSearch(each, replace(key, kernel=each.name), legal, device, store, how) for each in specs
            ]
            searches.append(ProblemSearch(problem, found, 6))
        ready: set[str] = {"library"}
        schedule, seen = Schedule(searches, lambda kernel: kernel.spec.backend in ready), []

        def drain() -> None:
            while (candidate := schedule.next()) is not None:
                candidate.search.observe(candidate, Measurement.from_samples([1.0], 0.0, {}))
                seen.append((candidate.search.problem.m, candidate.kernel.spec.backend))

        drain()
        assert seen[:2] == [(8, "library"), (16, "library")] and set(seen[2:]) == {(16, "library")} and len(seen) == 7
        assert not schedule.is_done() and schedule.left == searches[:1]
        ready.add("other")
        drain()
        assert seen[7] == (8, "other") and [m for m, _ in seen[7:]] == [8] * 5 and schedule.is_done()


def test_what_does_not_import_is_left_out_and_its_trials_go_to_the_others() -> None:
    problem, device = Problem("gram", 1, 8, 8, 8, "float32", "float32"), fingerprint("cpu")
    with Store.open("sqlite://") as store:
        search = problem_search(problem, [spec(""), spec("a"), spec("b")], device, store, 6, 0)
        search.kernels[1].spec = replace(search.kernels[1].spec, backend="broken")
        schedule, outcome = Schedule([search], lambda kernel: kernel.spec.backend != "broken"), OK
        first = schedule.next()
        assert first is not None
        search.observe(first, outcome)
        schedule.leave_out("broken")
        search.leave_out("broken")
        names = []
        while (candidate := schedule.next()) is not None:
            search.observe(candidate, outcome)
            names.append(candidate.kernel.spec.variant)
        assert len(names) == 5 and set(names) == {"", "b"} and schedule.is_done() and search.planned == 0


def end_search(store: Store, specs: list[KernelSpec], like: ProblemSearch | None, trials: int = 24) -> EndSearch:
    end = Problem("gram", 1, 8, 8, 8, "float32", "bfloat16")
    return EndSearch(end, kernel_searches(end, specs, fingerprint("cpu"), store, 0), trials, like)


def test_ends_come_after_products_and_are_a_fifth_of_the_candidates() -> None:
    problems, device = [Problem("gram", 1, m, m, 8, "float32", "float32") for m in (8, 16)], fingerprint("cpu")
    with Store.open("sqlite://") as store:
        products = [problem_search(problem, [spec("a"), spec("b")], device, store, 24, 0) for problem in problems]
        end = end_search(store, [spec("a"), spec("b")], products[0], trials=30)
        planned = sum(search.planned for search in (*products, end))
        schedule, outcome, is_end = Schedule([*products, end]), Measurement.from_samples([1.0], 0.0, {}), []
        while (candidate := schedule.next()) is not None:
            candidate.search.observe(candidate, outcome)
            is_end.append(candidate.search.is_end)
        assert is_end[:5] == [False] * 4 + [True] and is_end.count(True) == 15 and len(is_end) == planned == 63
        assert is_end[:50].count(True) == 10  # and at last what is left of them
        again = end_search(store, [spec("a"), spec("b")], products[0], trials=30)
        assert again.planned == 15


def test_an_end_waits_until_every_kernel_of_its_product_has_a_result() -> None:
    device, times = fingerprint("cpu"), {"library": 9.0, "own": 3.0}
    with Store.open("sqlite://") as store:
        specs = [spec(""), spec("own")]
        problem = Problem("gram", 1, 8, 8, 8, "float32", "float32")
        product = problem_search(problem, specs, device, store, 2, 0)
        end = end_search(store, specs, product, trials=2)
        schedule = Schedule([product, end])
        under_way = [schedule.next(), schedule.next()]
        assert [candidate and candidate.search for candidate in under_way] == [product, product]
        assert schedule.next() is None and not schedule.is_done()
        for candidate in under_way:
            assert candidate is not None
            median_us = times[candidate.kernel.spec.variant or "library"]
            product.observe(candidate, Measurement.from_samples([median_us], 0.0, {}))
            assert candidate is under_way[1] or schedule.next() is None
        assert not schedule.is_done()  # which takes nothing away
        found = schedule.next()
        assert found is not None and (found.search, found.kernel.spec.variant) == (end, "own")
        assert schedule.next() is None and schedule.is_done()


def test_an_end_does_not_wait_for_a_product_that_was_given_away() -> None:
    with Store.open("sqlite://") as store:
        specs = [spec(""), spec("own")]
        problem = Problem("gram", 1, 8, 8, 8, "float32", "float32")
        product = problem_search(problem, specs, fingerprint("cpu"), store, 2, 0)
        end = end_search(store, specs, product)
        schedule = Schedule([product, end])
        schedule.drop(product)
        found = schedule.next()
        assert found is not None and found.search is end


def test_an_end_starts_from_the_best_of_its_product_whenever_that_changes() -> None:
    device, times = fingerprint("cpu"), {3: 9.0, 5: 7.0, 8: 5.0}
    with Store.open("sqlite://") as store:
        specs = [spec("fast"), spec("slow")]
        product = problem_search(Problem("gram", 1, 8, 8, 8, "float32", "float32"), [*specs, spec("other")], device,
                                 store, 24, 0)
        by_variant = {each.spec.variant: each for each in product.kernels}

        def told(variant: str, place: int, median_us: float) -> None:
            candidate = Candidate(product, by_variant[variant], Config(place))
            product.observe(candidate, Measurement.from_samples([median_us], 0.0, {}))

        end = end_search(store, specs, product, trials=12)
        found: list[tuple[str, int] | None] = []

        def ask() -> None:
            candidate = end.propose()
            found.append(candidate and (candidate.kernel.spec.variant, candidate.config.place))

        for place in (3, 5):
            told("fast", place, times[place])
            ask()
        ask()
        told("other", 1, 1.0)  # a kernel that does not serve the end
        told("fast", 8, times[8])
        ask()
        ask()
        ask()
        ask()
    assert found == [("fast", 3), ("fast", 5), ("fast", 0), ("fast", 8), ("slow", 0), found[5], None]
    assert found[5] is not None and len(set(found)) == 7  # half of 12 trials


def test_an_end_that_was_measured_is_not_measured_again() -> None:
    with Store.open("sqlite://") as store:
        first = end_search(store, [spec("a")], None, trials=4)
        while (candidate := first.propose()) is not None:
            outcome = Measurement.from_samples([1.0 + candidate.config.place], 0.0, {})
            store.record(candidate.kernel.key, vars(candidate.config), outcome, {})
            first.observe(candidate, outcome)
        second = end_search(store, [spec("a")], None, trials=4)
        assert (second.reused, second.planned, second.propose()) == (2, 0, None)


def test_the_best_of_the_nearest_tuned_shape_come_before_what_no_one_knows() -> None:
    device, known = fingerprint("cpu"), {8: (5, 6), 64: (2, 9)}
    seeded = spec("seeded", seeds=lambda problem, device: [Config(7)])
    with Store.open("sqlite://") as store:
        for m, places in known.items():
            key = tuning_key(seeded, Problem("gram", 1, m, m, 8, "float32", "float32"), device)
            for rank, place in enumerate((*places, 11, 10)):
                outcome = Measurement.from_samples([100.0 + rank], 0.0, {})
                store.record(key, {"place": place}, outcome, {})
        problem = Problem("gram", 1, 48, 48, 8, "float32", "float32")
        search = problem_search(problem, [seeded], device, store, 12, 0)
        places = [place for _, place in order(search, {"seeded": Measurement.from_samples([1.0], 0.0, {})})]
    assert places[:5] == [0, 7, 2, 9, 11], "untuned, seeds, then three of m = 64"
    assert sorted(places) == list(range(12))


def test_what_other_caches_hold_of_the_problem_itself_comes_first_then_the_nearest_shapes(tmp_path: Path) -> None:
    """Of another version of the kernel, as a cache that was shipped earlier is; nothing of another architecture, nor
    what this version cannot read or run."""
    device, seeded = fingerprint("cpu"), spec("seeded")
    problems = {m: Problem("gram", 1, m, m, 8, "float32", "float32") for m in (8, 16, 64)}
    keys = {m: tuning_key(seeded, problem, device) for m, problem in problems.items()}

    def keep(store: Store, key: TuningKey, *configs: dict[str, Any]) -> None:
        for rank, config in enumerate(configs):
            store.record(key, config, Measurement.from_samples([100.0 + rank], 0.0, {}), {})

    with Store.open(tmp_path / "shipped.sqlite") as shipped:
        keep(shipped, replace(keys[16], spec_digest="old"), {"place": 6})
        keep(shipped, replace(keys[16], spec_digest="older"), {"place": 99}, {"row": 1})
        keep(shipped, replace(keys[16], device=replace(device, arch="sm_90")), {"place": 8})
        keep(shipped, keys[64], {"place": 3})
    environ = {"HOME": str(tmp_path), "DMUON_TUNE_CACHE_PATH": str(tmp_path / "shipped.sqlite")}
    with Store.open("sqlite://") as store, Layers.open(environ) as layers:
        keep(store, keys[8], {"place": 4}, {"place": 6}, {"place": 5})

        def best(m: int, spec: KernelSpec = seeded, layers: Layers | None = layers) -> list[int]:
            legal = spec.legal_space(problems[m], device)
            found = Neighbours(store, device, layers).best(spec, problems[m], legal.__contains__)
            return [config.place for config in found]

        assert best(16) == [6, 4, 5] and best(64) == [3, 6, 4]
        assert best(16, layers=None) == [4, 6, 5] and best(16, spec("unknown")) == []
        keep(store, keys[16], {"place": 1})  # what the search itself knows
        keep(store, keys[64], {"place": 3})
        assert best(64)[0] == 6


def test_a_search_ends_when_many_in_a_row_were_no_faster_beyond_noise() -> None:
    problem, device = Problem("gram", 1, 8, 8, 8, "float32", "float32"), fingerprint("cpu")
    times = iter([10.0, 12.0, 9.0, 9.5, 8.95, *[20.0] * 20])  # 8.95 is no improvement over 9
    with Store.open("sqlite://") as store:
        search = problem_search(problem, [spec("")], device, store, 12, 0, patience=4)
        assert search.planned == 12
        measured, candidates = 0, search.seeds()
        while candidates:
            search.observe(candidates[0], Measurement.from_samples([next(times)], 0.0, {}))
            measured += 1
            found = search.propose()
            candidates = [found] if found else []
        assert measured == 3 + 4 and search.planned == 0


def test_no_kernel_that_may_yet_win_loses_its_share_of_patience_to_another() -> None:
    """Nor does one that is far behind delay the end."""
    device, times = fingerprint("cpu"), {"a": 10.0, "b": 11.0, "far": 30.0}
    with Store.open("sqlite://") as store:
        search = problem_search(
            Problem("gram", 1, 8, 8, 8, "float32", "float32"), [spec(name) for name in times], device, store, 36, 0,
            patience=6,
        )
        counts: Counter[str] = Counter()
        queue = search.seeds()
        while queue:
            variant = queue[0].kernel.spec.variant
            counts[variant] += 1
            search.observe(queue.pop(0), Measurement.from_samples([times[variant]], 0.0, {}))
            if not queue:
                queue += [found] if (found := search.propose()) else []
        assert search.planned == 0
    assert counts == {"a": 7, "b": 6, "far": 3}


def test_trials_go_where_the_model_spends_its_time() -> None:
    problems, device = [Problem("gram", 1, m, m, 8, "float32", "float32") for m in (8, 16)], fingerprint("cpu")
    with Store.open("sqlite://") as store:
        searches = [
            problem_search(problem, [spec("")], device, store, 12, 0, launches=launches)
            for problem, launches in zip(problems, (1, 3), strict=True)
        ]
        schedule, counts = Schedule(searches), dict.fromkeys(searches, 0)
        while sum(counts.values()) < 12 and (candidate := schedule.next()) is not None:
            candidate.search.observe(candidate, Measurement.from_samples([10.0], 0.0, {}))
            counts[candidate.search] += 1
    assert list(counts.values()) == [3, 9]
