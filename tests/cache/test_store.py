"""The contract of every store: the same for a file, for a database in memory and for a PostgreSQL server."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from dmuon_tune.cache import ChainKey, Store, TuningKey
from dmuon_tune.measurement import STATUSES, Measurement
from dmuon_tune.recipe import Group, Pick, Recipe

Ok = Callable[..., Measurement]
CONFIG = {"block_m": 128, "swizzle": True, "order": "z", "nested": [1, 2]}


@pytest.fixture(params=["file", "memory", "sqlite URL", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    path = tmp_path / "cache.sqlite"
    where: dict[str, Callable[[], str | Path]] = {
        "file": lambda: path,
        "memory": lambda: "sqlite://",
        "sqlite URL": lambda: f"sqlite:///{path}",
        "postgresql": lambda: request.getfixturevalue("new_database")(),
    }
    with Store.open(where[request.param]()) as opened:
        yield opened


def test_a_result_comes_back_as_it_was_kept(store: Store, key: TuningKey, ok: Ok) -> None:
    measurement = ok(12.5, registers=96, smem_bytes=65536)
    provenance = {"host": "node-1", "label": "größe ✓"}
    store.record(key, CONFIG, measurement, provenance, validation="float64,poison,2-run")
    entry = store.best(key)
    assert entry is not None
    assert (entry.key, entry.key.device.name) == (key, key.device.name)
    assert (entry.config, entry.measurement, entry.provenance) == (CONFIG, measurement, provenance)
    assert entry.validation == "float64,poison,2-run"
    (trial,) = store.trials(key)
    assert (trial.key, trial.config, trial.measurement) == (key, CONFIG, measurement)
    assert datetime.fromisoformat(trial.created_at).utcoffset() is not None
    assert store.all_trials() == [trial]


def test_validation_is_taken_from_the_provenance(store: Store, key: TuningKey, ok: Ok) -> None:
    store.record(key, CONFIG, ok(1.0), {"validation": "float64"})
    entry = store.best(key)
    assert entry is not None and entry.validation == "float64"


def test_an_empty_store_answers_with_nothing(store: Store, key: TuningKey) -> None:
    assert (store.trials(key), store.best(key), store.entries(), store.all_trials()) == ([], None, [], [])
    assert (store.recipe(key.device, Group(1, 8, 8), "float16"), store.recipes(), store.counts()) == (None, [], {})


@pytest.mark.parametrize("status", [status for status in STATUSES if status != "ok"])
def test_failures_are_kept_and_never_win(store: Store, key: TuningKey, ok: Ok, status: str) -> None:
    failure = Measurement(status, log="line one\nline two: \udcff\0")
    store.record(key, CONFIG, failure, {})
    assert store.best(key) is None and store.entries() == []
    (trial,) = store.trials(key)
    assert trial.measurement.status == status and trial.measurement.log == "line one\nline two: ?"
    assert store.counts() == {status: 1}


def test_an_error_that_is_not_a_number_stays_an_error(store: Store, key: TuningKey) -> None:
    store.record(key, CONFIG, Measurement("wrong_result", max_rel_err=math.nan), {})
    assert store.trials(key)[0].measurement.max_rel_err == math.inf


def test_of_one_configuration_the_better_result_stays(store: Store, key: TuningKey, ok: Ok) -> None:
    crashed, slow, fast = Measurement("crashed", log="signal 11"), ok(20.0), ok(10.0)
    for recorded, expected in [
        (crashed, crashed),
        (Measurement("timeout"), crashed),
        (slow, slow),
        (Measurement("timeout"), slow),
        (fast, fast),
        (slow, fast),
        (crashed, fast),
    ]:
        store.record(key, dict(reversed(CONFIG.items())), recorded, {"of": recorded.status})
        (trial,) = store.trials(key)
        assert trial.measurement == expected
    entry = store.best(key)
    assert entry is not None and (entry.measurement, entry.provenance) == (fast, {"of": "ok"})


def test_the_fastest_ok_configuration_wins_in_any_order(store: Store, key: TuningKey, ok: Ok) -> None:
    store.record(key, {"block": 0}, Measurement("wrong_result"), {})
    for block, median_us in [(1, 30.0), (2, 10.0), (3, 20.0)]:
        store.record(key, {"block": block}, ok(median_us), {})
    entry = store.best(key)
    assert entry is not None and entry.config == {"block": 2}
    assert [trial.config["block"] for trial in store.trials(key)] == [0, 1, 2, 3]
    assert store.counts() == {"ok": 3, "wrong_result": 1}
    store.record(key, {"block": 3}, ok(5.0), {})
    entry = store.best(key)
    assert entry is not None and entry.config == {"block": 3} and entry.measurement == ok(5.0)


@pytest.mark.parametrize("part", ["problem", "kernel", "spec_digest", "device", "toolchain"])
def test_another_key_is_a_miss(
    store: Store, key: TuningKey, other_keys: dict[str, TuningKey], ok: Ok, part: str
) -> None:
    store.record(key, CONFIG, ok(1.0), {})
    assert store.best(other_keys[part]) is None and store.trials(other_keys[part]) == []


def test_entries_are_each_keys_best_fastest_first(
    store: Store, key: TuningKey, other_keys: dict[str, TuningKey], ok: Ok
) -> None:
    for median_us, one in enumerate([key, *other_keys.values()], start=1):
        store.record(one, {"block": 1}, ok(10.0 - median_us), {})
        store.record(one, {"block": 2}, ok(100.0), {})
    found = store.entries()
    assert [entry.key for entry in found] == [key, *other_keys.values()][::-1]
    assert all(entry.config == {"block": 1} for entry in found)
    of_problem = {entry.key for entry in store.entries(key.problem)}
    assert of_problem == {key, *other_keys.values()} - {other_keys["problem"]}
    of_both = {entry.key for entry in store.entries(key.problem, key.device)}
    assert of_both == of_problem - {other_keys["device"]}
    assert {entry.key for entry in store.entries(device=other_keys["device"].device)} == {other_keys["device"]}


def test_the_same_silicon_under_another_name_hits(store: Store, key: TuningKey, ok: Ok) -> None:
    store.record(key, CONFIG, ok(1.0), {})
    renamed = replace(key.device, name="NVIDIA H200 NVL")
    assert store.best(replace(key, device=renamed)) is not None
    assert len(store.entries(key.problem, renamed)) == 1
    store.put_recipe(renamed, Recipe(Group(1, 8, 16), "gram", "float16"))
    assert store.recipe(key.device, Group(1, 8, 16), "float16") is not None


def test_recipes_are_kept_by_device_group_and_dtype(
    store: Store, key: TuningKey, other_keys: dict[str, TuningKey]
) -> None:
    device, group = key.device, Group(8, 2048, 5464)
    old = Recipe(group, "plain", "float16", cost_us=90.0)
    new = Recipe(group, "gram", "float16", steps=6, restarts=(2, 4), cost_us=120.0)
    other_dtype = Recipe(group, "gram", "bfloat16")
    tall = Recipe(Group(8, 5464, 2048), "gram", "float16", restarts=())
    for recipe in (old, new, other_dtype, tall):
        store.put_recipe(device, recipe)
    elsewhere = other_keys["device"].device
    store.put_recipe(elsewhere, old)
    pick = Pick(key.problem, "gram.library", {"entry": "addmm", "nested": [1, 2]}, key.sha256)
    timed = Recipe(
        Group(4, 64, 64), "gram", "float16", cost_us=3.0, p20_us=2.5, p80_us=3.5, chunk=2, picks=(pick,),
        batch_costs=((1, 1.0), (2, 1.5)),
    )
    store.put_recipe(elsewhere, timed)
    assert store.recipe(elsewhere, timed.group, "float16") == timed and timed.timed
    assert store.recipe(device, group, "float16") == new
    assert store.recipe(device, group, "bfloat16") == other_dtype
    assert store.recipe(device, group, "float32") is None
    assert store.recipe(device, Group(7, 2048, 5464), "float16") is None
    assert store.recipes(device) == [new, other_dtype, tall]
    assert store.recipes(elsewhere) == [old, timed]
    assert len(store.recipes()) == 5


def test_timed_chains_are_kept_by_all_that_makes_them(store: Store, key: TuningKey, ok: Ok) -> None:
    pick = Pick(key.problem, key.kernel, CONFIG, key.sha256)
    recipe = Recipe(Group(8, 2048, 5464), "gram", "float16", chunk=4, picks=(pick,))
    chain = ChainKey(recipe, "code", key.device)
    assert store.chain_trial(chain) is None and store.chain_trials() == []
    for recorded, expected in [
        (Measurement("crashed", log="signal 11"), "crashed"), (Measurement("timeout"), "crashed"), (ok(20.0), 20.0),
        (ok(10.0), 10.0), (ok(15.0), 10.0), (Measurement("timeout"), 10.0),
    ]:
        store.record_chain(chain, recorded, {"of": recorded.status})
        (trial,) = store.chain_trials(key.device)
        assert trial == store.chain_trial(chain)
        assert (trial.key.sha256, trial.recipe, trial.device) == (chain.sha256, recipe, key.device)
        assert trial.recipe.picks[0].config == CONFIG
        assert (trial.measurement.median_us or trial.measurement.status) == expected
    priced = replace(recipe, cost_us=5.0, p20_us=4.0, p80_us=6.0, batch_costs=((1, 2.0),))
    assert store.chain_trial(replace(chain, recipe=priced)) is not None  # a cost is no part of the key
    for other in (
        replace(chain, recipe=replace(recipe, chunk=None)),
        replace(chain, recipe=replace(recipe, form="plain")),
        replace(chain, recipe=replace(recipe, picks=(replace(pick, key="other code"),))),
        replace(chain, recipe=replace(recipe, picks=(replace(pick, config={}),))),
        replace(chain, code_digest="other"),
        replace(chain, device=replace(key.device, sm_count=60)),
    ):
        assert store.chain_trial(other) is None
    assert store.counts() == {}


def test_an_undisturbed_timing_replaces_a_disturbed_one_however_fast(store: Store, key: TuningKey, ok: Ok) -> None:
    chain = ChainKey(Recipe(Group(8, 2048, 5464), "gram", "float16"), "code", key.device)
    for recorded, expected in [
        (ok(10.0, contended=True), 10.0), (ok(9.0, contended=True), 9.0), (ok(12.0), 12.0),
        (ok(8.0, contended=True), 12.0), (ok(11.0), 11.0), (Measurement("timeout"), 11.0),
    ]:
        store.record(key, CONFIG, recorded, {})
        store.record_chain(chain, recorded, {})
        (trial,), (timed,) = store.trials(key), store.chain_trials()
        best = store.best(key)
        assert best is not None and best.measurement == trial.measurement == timed.measurement
        assert trial.measurement.median_us == expected


def test_a_race_decides_for_its_winner_until_something_is_far_faster(store: Store, key: TuningKey, ok: Ok) -> None:
    configs = [{"block": block} for block in range(5)]
    for config, median_us in zip(configs, [10.0, 11.0, 12.0, 13.0], strict=False):
        store.record(key, config, ok(median_us), {"validation": "screened"})
    created = [trial.created_at for trial in store.trials(key)]
    failure = Measurement("wrong_result", log="a rare race")
    store.record_race(
        [
            (key, configs[0], failure), (key, configs[1], ok(11.5, race={"place": 1})),
            (key, configs[2], ok(11.6, race={"place": 0})),
        ],
        {"validation": "raced"},
    )
    best = store.best(key)
    assert best is not None and (best.config, best.validation) == (configs[2], "raced")
    trials = store.trials(key)
    assert [trial.created_at for trial in trials] == created
    assert [trial.measurement.status for trial in trials] == ["wrong_result", "ok", "ok", "ok"]
    assert [entry.config for entry in store.entries()] == [configs[2]]
    store.record(key, configs[2], ok(9.0), {})  # a screening once more is no race
    store.record(key, configs[3], ok(11.0), {})  # nor is this one's enough
    assert [trial.measurement.median_us for trial in store.trials(key)] == [None, 11.5, 11.6, 11.0]
    assert store.best(key) == best
    store.record(key, configs[4], ok(5.0), {})
    faster = store.best(key)
    assert faster is not None and faster.config == configs[4]
    raced_last = [(key, configs[4], ok(5.5, race={"place": 1})), (key, configs[2], ok(5.4, race={"place": 0}))]
    store.record_race(raced_last, {})
    again = store.best(key)
    assert again is not None and again.config == configs[2]
    store.record_race([(key, config, failure) for config in configs], {})
    assert store.best(key) is None and store.entries() == []
