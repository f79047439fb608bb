"""A PostgreSQL server as the cache: its errors in one line, many writers at once, migrations, and as a layer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, inspect, make_url, text

from dmuon_tune.cache import Layers, Store, TuningKey
from dmuon_tune.errors import CacheError, UsageError
from dmuon_tune.measurement import Measurement
from dmuon_tune.recipe import Group, Recipe

Ok = Callable[..., Measurement]
SECRETS = ("p@ss", "p%40ss", "w:rd", "wrong-secret")

RECORD = """
import json, sys
from dmuon_tune.cache import Store, TuningKey
from dmuon_tune.measurement import Measurement
key, name = TuningKey.from_dict(json.loads(sys.argv[1])), sys.argv[3]
print("ready", flush=True)
input()
with Store.open_user(sys.argv[2]) as store:
    for block in range(10):
        store.record(key, {"by": name, "block": block}, Measurement.from_samples([2.0 + block], 0.0, {}), {})
        store.record(key, {"by": "both"}, Measurement.from_samples([1.0 + block], 0.0, {}), {})
"""


@pytest.fixture
def url(new_database: Callable[[], str]) -> str:
    return new_database()


def assert_one_useful_line(error: Exception, *hints: str) -> None:
    message = str(error)
    assert "\n" not in message and ";" in message and not any(secret in message for secret in SECRETS), message
    assert all(hint in message for hint in hints), message


def one_of(url: str, **parts: Any) -> str:
    return make_url(url).set(**parts).render_as_string(hide_password=False)


def test_what_stands_in_the_way_of_a_server_is_said(url: str) -> None:
    for bad, hint in [
        (one_of(url, port=1), "refused"),
        (one_of(url, password="wrong-secret"), "password authentication failed"),
        (one_of(url, database="none_such"), "does not exist"),
        (one_of(url, host="no-such-host.invalid"), "no-such-host.invalid"),
        (url + "?password=wrong-secret", "password authentication failed"),
    ]:
        for read_only in (False, True):
            with pytest.raises(CacheError, match="cannot be reached") as caught:
                Store.open(bad, read_only=read_only)
            assert_one_useful_line(caught.value, hint, "check the URL")
            assert caught.value.exit_code == 4


@pytest.mark.parametrize("password", ["a/p@ss", "12/p@ss", "p@ss:1/x", "x:p@ss/"])
def test_an_unquoted_password_is_a_usage_error_that_does_not_repeat_it(password: str) -> None:
    with pytest.raises(UsageError) as caught:
        Store.open(f"postgresql+psycopg://tuner:{password}@localhost/muon")
    assert_one_useful_line(caught.value, "%XX")


def test_a_missing_driver_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    for name in ("postgresql", "postgresql+psycopg"):
        with pytest.raises(CacheError, match=r"psycopg.*; install dmuon-tune\[postgres\]") as caught:
            Store.open(f"{name}://tuner:p%40ss@localhost/muon")
        assert_one_useful_line(caught.value)


def test_a_store_names_its_server_without_the_password(url: str, key: TuningKey, ok: Ok) -> None:
    with Store.open(url.replace("+psycopg", "")) as store:
        assert store.is_server and store.where == f"postgresql+psycopg://tuner:***@127.0.0.1:{make_url(url).port}/" + (
            make_url(url).database or ""
        )
        store.record(key, {}, ok(1.0), {"host": "node-1"})
        everything = repr((store.all_trials(), store.entries()[0].provenance))
        assert not any(secret in everything for secret in SECRETS)


def test_a_reader_cannot_write_and_an_empty_database_is_said(url: str, key: TuningKey, ok: Ok) -> None:
    with pytest.raises(CacheError, match="is empty; fill it with: dmuon-tune tune --storage"):
        Store.open(url, read_only=True)
    with Store.open(url) as store:
        store.record(key, {}, ok(1.0), {})
    with Store.open(url, read_only=True) as store:
        assert len(store.entries()) == 1
        with pytest.raises(CacheError, match="opened read-only"):
            store.record(key, {}, ok(1.0), {})
        with store._reading() as session, pytest.raises(Exception, match="read-only transaction"):
            session.execute(text("DELETE FROM dmuon_winners"))  # the server refuses it too


def test_a_user_without_the_right_to_write_is_told(
    url: str, postgres_server: Any, key: TuningKey, ok: Ok
) -> None:
    with Store.open(url) as store:
        store.record(key, {}, ok(1.0), {})
    database = make_url(url).database
    postgres_server.execute("DROP ROLE IF EXISTS reader")
    postgres_server.execute("CREATE ROLE reader LOGIN PASSWORD 'wrong-secret'")
    postgres_server.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader", database)
    as_reader = one_of(url, username="reader", password="wrong-secret")
    with Store.open(as_reader, read_only=True) as store:
        assert len(store.entries()) == 1
    with Store.open(as_reader) as store, pytest.raises(CacheError, match="may not be written") as caught:
        store.record(key, {"block": 1}, ok(1.0), {})
    assert_one_useful_line(caught.value, "permission denied")


def test_a_lock_that_is_held_too_long_is_said(
    url: str, key: TuningKey, ok: Ok, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DMUON_TUNE_BUSY_TIMEOUT_S", "0.2")
    with Store.open(f"{url}?connect_timeout=60") as store:  # a connection takes its time beside other work
        store.record(key, {}, ok(2.0), {})
        engine = create_engine(url)
        with engine.begin() as holder:
            holder.execute(text("LOCK TABLE dmuon_trials"))
            with pytest.raises(CacheError, match=r"locked .* 0\.2 s; .*DMUON_TUNE_BUSY_TIMEOUT_S"):
                store.record(key, {}, ok(1.0), {})
        engine.dispose()
        store.record(key, {}, ok(1.0), {})


def test_processes_may_create_and_record_at_once(url: str, key: TuningKey, ok: Ok, spawn: Callable[..., Any]) -> None:
    processes = [spawn(RECORD, json.dumps(key.to_dict()), url, name) for name in "abc"]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 3
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.wait(60) for process in processes] == [0, 0, 0], [process.stderr.read() for process in processes]
    with Store.open(url, read_only=True) as store:
        assert len(store.trials(key)) == 31
        entry = store.best(key)
        assert entry is not None and entry.config == {"by": "both"} and entry.measurement.median_us == 1.0


def test_a_server_that_restarts_is_found_again(url: str, postgres_server: Any, key: TuningKey, ok: Ok) -> None:
    with Store.open(url) as store:
        store.record(key, {"block": 0}, ok(2.0), {})
        postgres_server.stop()
        with pytest.raises(CacheError, match="cannot be reached.*and run again"):
            store.record(key, {"block": 1}, ok(1.0), {})
        postgres_server.start()
        store.record(key, {"block": 1}, ok(1.0), {})
        assert len(store.trials(key)) == 2


def columns(engine: Engine) -> dict[str, Any]:
    inspector = inspect(engine)
    return {
        table: sorted(
            (column["name"], str(column["type"]), column["nullable"]) for column in inspector.get_columns(table)
        )
        for table in inspector.get_table_names()
    }


def test_the_first_schema_becomes_the_current_one(url: str, key: TuningKey, ok: Ok) -> None:
    with Store.open(url) as store:
        store.record(key, {}, ok(1.0), {})
        store.put_recipe(key.device, Recipe(Group(8, 2048, 5464), "gram", "float16", cost_us=5.0))
    engine = create_engine(url)
    current = columns(engine)
    with engine.begin() as connection:
        for table in ("dmuon_claims", "dmuon_chains"):
            connection.execute(text(f"DROP TABLE {table}"))
        connection.execute(text("ALTER TABLE dmuon_keys DROP COLUMN validation"))
        for column in ("p20_us", "p80_us", "chunk", "picks", "batch_costs"):
            connection.execute(text(f"ALTER TABLE dmuon_recipes DROP COLUMN {column}"))
        connection.execute(text("UPDATE dmuon_meta SET value = '1'"))
    with pytest.raises(CacheError, match="schema version 1.*brings it up to date"):
        Store.open(url, read_only=True)
    with Store.open(url) as store:
        assert len(store.recipes()) == len(store.trials(key)) == 1
    assert columns(engine) == current
    engine.dispose()


def test_a_server_is_a_layer_among_files(url: str, key: TuningKey, ok: Ok, tmp_path: Any) -> None:
    file = tmp_path / "cache.sqlite"
    for place, steps in ((url, 5), (file, 6)):
        with Store.open(place) as store:
            store.record(key, {"steps": steps}, ok(1.0), {})
            store.put_recipe(key.device, Recipe(Group(8, 64, 64), "gram", "float16", steps=steps))
    for listed, order in ((f"{file}:{url}", [6, 5]), (f"{url}:{file}", [5, 6]), (f":{url}:{url}", [5])):
        with Layers.open({"HOME": str(tmp_path), "DMUON_TUNE_CACHE_PATH": listed}) as layers:
            assert [entry.config["steps"] for _, entry in layers.entries(key.problem, key.device)] == order
            found = layers.recipe(key.device, Group(8, 64, 64), "float16")
            assert found is not None and (found[0], found[1].steps) == ("path", order[0])
            described = layers.descriptions()
            assert [each["state"] for each in described][: len(order)] == ["ok"] * len(order)
            assert not any(secret in json.dumps(described) for secret in SECRETS)


@pytest.mark.parametrize("bad", ["postgresql+psycopg://tuner:p%40ss@127.0.0.1:1/muon", "oracle://u:p%40ss@host/x"])
def test_a_server_that_does_not_answer_stops_no_job(
    bad: str, key: TuningKey, ok: Ok, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("psycopg")
    with Store.open(tmp_path / "cache.sqlite") as store:
        store.record(key, {}, ok(1.0), {})
    listed = f"{bad}:{tmp_path / 'cache.sqlite'}"
    for _ in range(2):
        with Layers.open({"HOME": str(tmp_path), "DMUON_TUNE_CACHE_PATH": listed}) as layers:
            assert len(layers.entries(key.problem, key.device)) == 1
            assert layers.descriptions()[0]["state"] == "unreadable"
            assert "p%40ss" not in json.dumps(layers.descriptions())
    (warning,) = caplog.messages
    assert "is left out" in warning and not any(secret in warning for secret in SECRETS)
