"""Rows that SQLite finds sound and no run has written: one line, and a layer with such a row stops no training."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from math import inf
from pathlib import Path
from typing import Any

import pytest

from dmuon_tune.cache import ChainKey, Layers, Store, TuningKey, contents_of
from dmuon_tune.errors import CacheError
from dmuon_tune.measurement import Measurement
from dmuon_tune.recipe import Group, Pick, Recipe

from .conftest import KEY

Ok = Callable[..., Measurement]
GROUP = Group(8, 2048, 5464)
OF_MEASUREMENTS = [
    ("status", "crash"), ("status", "crashed"), ("median_us", "x"), ("median_us", 0.0), ("median_us", -1.0),
    ("p20_us", inf), ("p80_us", b"\xff"), ("samples", "x"), ("samples", "{}"), ("samples", '["x"]'),
    ("samples", "[null]"), ("samples", "[-1]"), ("max_rel_err", "x"), ("max_rel_err", -1), ("resources", "null"),
    ("resources", "[]"), ("resources", '{"race":"x"}'), ("resources", '{"race":{"place":"x"}}'), ("log", b"\xff"),
    ("provenance", "null"), ("provenance", "[]"),
]
OF_RECIPES = [
    ("picks", "zz"), ("picks", "[1]"), ("form", b"\xff"), ("dtype", "float8"), ("batch", 0), ("rows", "x"),
    ("cols", -1), ("chunk", 0), ("chunk", "x"), ("steps", -1), ("steps", "x"), ("restarts", '["x"]'), ("restarts", "7"),
    ("cost_us", "x"), ("p20_us", -1.0), ("batch_costs", '[[1,"x"]]'), ("batch_costs", "[[0,1.0]]"),
]
DAMAGES = [
    *(("trials", *damage) for damage in OF_MEASUREMENTS), *(("chains", *damage) for damage in OF_MEASUREMENTS),
    *(("recipes", *damage) for damage in OF_RECIPES),
    ("trials", "config", "[]"), ("trials", "config", "null"), ("chains", "recipe", "null"), ("chains", "recipe", "{}"),
    ("problems", "epilogue", "zz"), ("problems", "m", "-3"), ("keys", "sha256", "zz"), ("toolchains", "versions", "7"),
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "cache.sqlite"
    config = {"tile_m": 1}
    recipe = Recipe(
        GROUP, "gram", "float16", picks=(Pick(KEY.problem, KEY.kernel, config, KEY.sha256),), batch_costs=((4, 2.0),)
    )
    with Store.open(path) as store:
        store.record(KEY, config, Measurement.from_samples([1.0], 1e-3, {}), {"date": "2026-11-30"})
        store.put_recipe(KEY.device, recipe)
        store.record_chain(ChainKey(recipe, "ef" * 32, KEY.device), Measurement.from_samples([3.0], 1e-3, {}), {})
    return path


@pytest.fixture
def filled(sound: Path, tmp_path: Path) -> Path:
    """A copy for this test."""
    return Path(shutil.copy(sound, tmp_path))


def damage(path: Path, table: str, column: str, value: Any) -> None:
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute(f"UPDATE dmuon_{table} SET {column} = ?", (value,))


@pytest.mark.parametrize(("table", "column", "value"), DAMAGES)
def test_a_damaged_row_is_told_with_its_cache(table: str, column: str, value: Any, filled: Path) -> None:
    damage(filled, table, column, value)
    with Store.open(filled, read_only=True) as store:
        store.check()  # SQLite finds nothing
        with pytest.raises(CacheError, match=f"{filled} is damaged: it holds") as caught:
            contents_of(store)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("table", "column", "value"), DAMAGES)
def test_a_layer_with_a_damaged_row_stops_no_training(
    table: str, column: str, value: Any, filled: Path, key: TuningKey, caplog: pytest.LogCaptureFixture
) -> None:
    with Store.open(filled, read_only=True) as store:
        ((_, entry),) = [("path", each) for each in store.entries()]
        recipe = store.recipe(key.device, GROUP, "float16")
    damage(filled, table, column, value)
    with Layers.open({"HOME": str(filled.parent), "DMUON_TUNE_CACHE_PATH": str(filled)}) as layers:
        found = layers.entries(key.problem, key.device), layers.recipe(key.device, GROUP, "float16")
    assert found[0] in ([], [("path", entry)]) and found[1] in (None, ("path", recipe))
    assert all("\n" not in message and "left out" in message for message in caplog.messages)
    assert len(caplog.messages) <= 1


def test_a_result_beside_a_damaged_one_is_refused_in_a_line(filled: Path, key: TuningKey, ok: Ok) -> None:
    damage(filled, "trials", "samples", "{}")
    with Store.open(filled) as store, pytest.raises(CacheError, match="is damaged: it holds"):
        store.record(key, {"tile_m": 2}, ok(2.0), {})
