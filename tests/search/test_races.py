"""Who races, what a race's result makes of it, and that a second run finds nothing to race."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import Store
from dmuon_tune.measure.job import RaceResult
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.search.problem_search import ProblemSearch, problem_search
from dmuon_tune.search.races import Finals, finalists, job_of, retimings
from dmuon_tune.space import choice
from dmuon_tune.spec import KernelSpec

PROBLEM = Problem("gram", 1, 8, 8, 8, "float32", "float32")
CPU = fingerprint("cpu")


@dataclass(frozen=True)
class One:
    """No axes."""


@dataclass(frozen=True)
class Many:
    place: int = choice(0, range(16))


def spec(variant: str, config: type) -> KernelSpec:
    return KernelSpec(
        "gram", "library", config, lambda problem, device: None, lambda *_: None, ("dmuon_tune.space",),
        variant=variant,
    )


SPECS = [spec("", One), spec("many", Many)]


def ok(median_us: float, **resources: Any) -> Measurement:
    return Measurement.from_samples([median_us], 0.0, resources)


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.open("sqlite://") as opened:
        yield opened


def search_of(store: Store, trials: int = 40, patience: int | None = None) -> ProblemSearch:
    return problem_search(PROBLEM, SPECS, CPU, store, trials, 0, patience=patience)


def screened(store: Store, library_us: float, *others: Measurement) -> ProblemSearch:
    """A search over a store that holds these results."""
    search = search_of(store)
    by_name = {each.spec.variant: each.key for each in search.kernels}
    store.record(by_name[""], {}, ok(library_us), {})
    for place, measurement in enumerate(others):
        store.record(by_name["many"], {"place": place}, measurement, {})
    return search_of(store)


def racing(search: ProblemSearch, most: int = 8) -> list[tuple[str, Any]]:
    return [
        (each.entry.key.kernel.rpartition(".")[2], each.entry.config.get("place"))
        for each in finalists(search, {}, most)
    ]


def test_the_fastest_within_reach_race_with_the_library_and_the_untuned(store: Store) -> None:
    search = screened(store, 12.0, ok(11.9), ok(10.0), ok(10.5), ok(11.0), ok(11.6), ok(9.0, contended=True))
    assert racing(search) == [("many", 5), ("library", None), ("many", 1), ("many", 0)]
    assert racing(search, most=1) == [("many", 5), ("library", None), ("many", 0)]
    far = screened(store, 100.0)
    assert ("library", None) in racing(far), "a slower result of the same configuration does not replace the first"


def test_what_is_far_behind_does_not_race_unless_its_timing_was_disturbed(store: Store) -> None:
    assert racing(screened(store, 100.0, ok(50.0), ok(10.0))) == []
    disturbed = replace(ok(100.0), resources={"contended": True})
    with Store.open("sqlite://") as other:
        search = screened(other, 10.0, disturbed)
        assert racing(search) == [("library", None), ("many", 0)]
        assert retimings(search, finalists(search, {}, 8)) == []
        assert [each.candidate.config for each in retimings(search, ())] == [Many(0)]


def race_of(store: Store, *results: Measurement | None) -> tuple[ProblemSearch, bool]:
    """A race of two of ``many`` and the library with these results for the entrants in order."""
    search = screened(store, 12.0, ok(10.4, compile_s=3.0, launches_per_window=7), ok(10.0))
    finals = Finals([search], store, {}, 8)
    race = finals.next_race()
    assert race is not None and finals.races == 1
    job = job_of(race, "cpu", 5, 1.0)
    assert [entrant.config.get("place") for entrant in job.entrants] == [1, None, 0]
    assert [entrant.launches for entrant in job.entrants] == [1, 1, 7]
    decided = finals.keep(race, RaceResult(results), {})
    return search, decided


def raced(median_us: float, tied: bool) -> Measurement:
    return ok(median_us, race={"windows": 30, "tied": tied})


def test_ties_go_to_the_preferred_and_the_place_decides_from_then_on(store: Store) -> None:
    search, decided = race_of(store, raced(10.3, True), raced(11.0, False), raced(10.4, True))
    assert decided
    best = search.winner({})
    assert best is not None and best.config == {"place": 0}, "the untuned one before what ties with it"
    assert best.measurement.resources["compile_s"] == 3.0 and best.measurement.median_us == 10.4
    places = {entry.config.get("place"): entry.measurement.place for entry in store.entries()}
    assert places == {None: 2, 0: 0}, "a key's entry is its kernel's best place"
    again = search_of(store)
    assert finalists(again, {}, 8) == () and retimings(again, ()) == []
    kept = again.winner({})
    assert kept is not None and (kept.config, kept.measurement) == (best.config, best.measurement)
    store.record(again.kernels[1].key, {"place": 9}, ok(10.2), {})
    assert racing(search_of(store)) == [("many", 9), ("library", None), ("many", 1), ("many", 0)]


def test_a_finalist_that_fails_drops_out_and_one_left_out_keeps_its_screening(store: Store) -> None:
    search, decided = race_of(store, Measurement("wrong_result", log="once in a while"), raced(11.0, True), None)
    best = search.winner({})
    assert decided and best is not None and best.key.kernel == "gram.library"
    assert search.statuses() == {"ok": 2, "wrong_result": 1}
    assert {trial.measurement.status for trial in store.all_trials()} == {"ok", "wrong_result"}


def test_one_that_takes_the_process_along_is_kept_and_the_others_race_again(store: Store) -> None:
    search = screened(store, 12.0, ok(10.4), ok(10.0))
    finals = Finals([search], store, {}, 8)
    race = finals.next_race()
    assert race is not None
    assert not finals.keep(race, Measurement("crashed", resources={"entrant": 0}, log="signal 11"), {})
    assert search.statuses() == {"ok": 2, "crashed": 1}
    left = finals.next_race()
    assert left is not None and len(left.entrants) == 2
    assert all(each.entry.key == race.entrants[0].entry.key or each.is_library for each in left.entrants)
    assert race.entrants[0].entry.config not in [each.entry.config for each in left.entrants]
    assert finals.next_race() is None


def test_a_race_that_nobody_in_particular_ended_is_held_again_stepwise_and_then_said(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    search = screened(store, 12.0, ok(10.4), ok(10.0))
    finals = Finals([search], store, {}, 8)
    race = finals.next_race()
    assert race is not None and not job_of(race, "cpu", 5, 1.0).stepwise
    for _ in range(2):
        assert race is not None and not finals.keep(race, Measurement("timeout", log="one\nbetween windows"), {})
        assert bool(caplog.messages) == race.stepwise
        race = finals.next_race()
        assert race is None or race.stepwise and job_of(race, "cpu", 5, 1.0).stepwise
    assert race is None and search.statuses() == {"ok": 3}
    (said,) = caplog.messages
    assert search.problem.label() in said and "timeout: between windows" in said


def test_a_search_that_a_race_has_ended_stays_ended_until_more_trials_are_asked(store: Store) -> None:
    search = screened(store, 12.0, *(ok(10.0 + place / 10) for place in range(8)))
    patient = search_of(store, patience=7)
    assert search.planned == 8 and patient.planned == 0 and patient.propose() is None
    finals = Finals([patient], store, {}, 8)
    race = finals.next_race()
    assert race is not None
    # By the race's medians the last one was an improvement: alone that would let the search go on.
    results = [raced(8.0 if each.entry.config == {"place": 7} else 10.0, False) for each in race.entrants]
    finals.keep(race, RaceResult(tuple(results)), {})
    assert search_of(store, patience=7).planned == 0
    assert search_of(store, trials=41, patience=9).planned > 0


def test_a_disturbed_race_decides_nothing_and_is_held_again(store: Store) -> None:
    noisy = [ok(each, race={"windows": 60, "tied": True}, contended=True) for each in (99.0, 9.0)]
    search, decided = race_of(store, *noisy, Measurement("crashed"))
    assert not decided and search.statuses() == {"ok": 2, "crashed": 1}
    medians = {each.entry.config.get("place"): each.median_us for each in search.contenders({})}
    assert medians == {1: 10.0, None: 12.0}, "the screening was not disturbed"
    assert racing(search_of(store)) == [("many", 1), ("library", None)]
