"""Efforts, and what a plan says before anything is measured."""

from __future__ import annotations

import pytest

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import Contents, Store, Trial, keep
from dmuon_tune.cli.tune import EFFORTS as SHOWN_EFFORTS
from dmuon_tune.errors import UsageError
from dmuon_tune.kernel_specs import kernel
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group
from dmuon_tune.search import TuneOptions, plan
from dmuon_tune.search.options import EFFORTS


def test_efforts_and_what_replaces_their_parts() -> None:
    assert tuple(EFFORTS) == SHOWN_EFFORTS
    quick, normal, most = (TuneOptions.of_effort(name) for name in EFFORTS)
    assert quick.trials < normal.trials < most.trials
    assert quick.budget_s is not None and normal.budget_s is not None and most.budget_s is None
    assert quick.budget_s < 90 and normal.budget_s < 480
    counted = TuneOptions.of_effort("quick", trials=5, seed=3)
    assert (counted.trials, counted.budget_s, counted.seed) == (5, None, 3)
    limited = TuneOptions.of_effort("normal", budget_s=60.0)
    assert (limited.trials, limited.budget_s) == (normal.trials, 60.0)
    with pytest.raises(UsageError, match="unknown effort 'some'"):
        TuneOptions.of_effort("some")


def test_a_plan_counts_what_is_left_and_learns_the_pace_from_the_cache() -> None:
    options = TuneOptions(device="cpu", backends=("library",), trials=5)
    with Store.open("sqlite://") as store:
        fresh = plan([Group(1, 8, 24)], store, options)
        assert {each.problem.op for each in fresh.problems} == {"gram", "gemm_symmetric", "apply"}
        assert sum(each.share for each in fresh.problems) == pytest.approx(1)
        assert all(each.planned == sum(each.legal.values()) - each.known > 0 for each in fresh.problems)
        assert not fresh.is_measured and fresh.estimate_s > sum(each.planned for each in fresh.problems) * fresh.pace_s
        gram = next(each.problem for each in fresh.problems if each.problem.op == "gram")
        spec = kernel("gram.library")
        configs = [vars(config) for config in spec.legal_space(gram, fingerprint("cpu"))]
        for config in configs:
            store.record(tuning_key(spec, gram, fingerprint("cpu")), config, ok(7.0), {})
        other = Problem("gram", 1, 9, 9, 9, "float32", "float32")
        for place in range(12):  # of other code: they tell the pace alone
            store.record(tuning_key(spec, other, fingerprint("cpu")), {"entry": f"older {place}"}, ok(7.0), {})
        later = plan([Group(1, 8, 24)], store, options)
        (known,) = [each for each in later.problems if each.problem == gram]
        assert (known.known, known.planned, known.best_us) == (len(configs), 0, 7.0)
        assert later.is_measured and later.pace_s < 1.0 and later.estimate_s < fresh.estimate_s


def test_several_devices_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU is one device, so that names alone stand for others here."""
    monkeypatch.setattr("dmuon_tune.search.options.resolve_alike", lambda names: ("cpu",) * len(names))
    with Store.open("sqlite://") as store:
        one, two = (
            plan([Group(1, 8, 24)], store, TuneOptions(devices=devices, backends=("library",)))
            for devices in (("a",), ("a", "b"))
        )
    assert two.estimate_s == pytest.approx(one.estimate_s / 2) and two.problems == one.problems


def test_the_pace_is_that_of_one_of_several_devices() -> None:
    spec, problem = kernel("gram.library"), Problem("gram", 1, 9, 9, 9, "float32", "float32")
    key, second = tuning_key(spec, problem, fingerprint("cpu")), "2026-11-30T04:00:{:02}.000+00:00"
    trials = tuple(
        Trial(key, {"entry": f"older {place}"}, ok(7.0), "", {"on": f"cuda:{place % 2}"}, second.format(place))
        for place in range(24)
    )
    with Store.open("sqlite://") as store:
        keep(store, lambda nothing: Contents(trials))
        found = plan([Group(1, 8, 24)], store, TuneOptions(device="cpu", backends=("library",)))
    assert found.is_measured and found.pace_s == pytest.approx(2)


def ok(median_us: float) -> Measurement:
    return Measurement.from_samples([median_us], 0.0, {})
