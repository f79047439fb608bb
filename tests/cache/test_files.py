"""Bad, read-only, odd and busy files: one line that says what to do, and nothing lost or left behind."""

from __future__ import annotations

import logging
import os
import random
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect, text

from dmuon_tune.cache import ChainKey, Layers, Store, TuningKey, contents_of, is_bundle
from dmuon_tune.cache.database import folder_lock, open_engine, use_wal
from dmuon_tune.cache.migrations import SCHEMA_VERSION, found_version, prepare, require_current
from dmuon_tune.errors import CacheError, UsageError
from dmuon_tune.measurement import Measurement
from dmuon_tune.recipe import Group, Recipe

Ok = Callable[..., Measurement]
ROWS = 12
RELEASED = Path(__file__).parent / "released"
NAMES = ["größe 中文", "a b", "50%25", "what?mode=memory", "#1", "file:x", os.fsdecode(b"\xff")]


def filled(path: Path, key: TuningKey, measurement: Measurement) -> Path:
    with Store.open(path) as store:
        for block in range(ROWS):
            store.record(key, {"block": block, "text": "x" * 1000}, measurement, {})
    return path


def set_version(path: Path, version: str | bytes) -> None:
    connection = sqlite3.connect(path)
    connection.execute("UPDATE dmuon_meta SET value = ? WHERE name = 'schema_version'", (version,))
    connection.commit()
    connection.close()


def stay_wal(path: Path) -> None:
    """Leave the file marked for write-ahead logging, as a killed process does."""
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA journal_mode=WAL").fetchone() == ("wal",)
    connection.close()


def not_sqlite(path: Path) -> None:
    path.write_text("block_m,median_us\n128,12.5\n" * 100)


def short_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5000])


def other_database(path: Path) -> None:
    path.unlink()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.close()


def no_version(path: Path) -> None:
    set_version(path, "one")


def no_meta_table(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("DROP TABLE dmuon_meta")
    connection.close()


def other_views(path: Path) -> None:
    path.unlink()
    connection = sqlite3.connect(path)
    connection.execute("CREATE VIEW today AS SELECT date()")
    connection.close()


def version_of_no_schema(path: Path) -> None:
    set_version(path, "0")


def endless_version(path: Path) -> None:
    set_version(path, "9" * 5000)


def version_in_other_digits(path: Path) -> None:
    set_version(path, "\u0664")


def version_of_bytes(path: Path) -> None:
    set_version(path, b"4")


def undecodable_schema(path: Path) -> None:
    """One flipped bit, in what SQLite then quotes in its message."""
    content = bytearray(path.read_bytes())
    content[content.index(b"CREATE TABLE dmuon_keys") + 8] ^= 0x80
    path.write_bytes(content)


CORRUPTIONS = [
    not_sqlite, short_header, truncated, no_version, no_meta_table, version_of_no_schema, endless_version,
    version_in_other_digits, version_of_bytes, undecodable_schema,
]
OTHERS = [other_database, other_views]


def assert_one_useful_line(error: CacheError, path: Path) -> None:
    message = str(error)
    assert "\n" not in message and str(path) in message and ";" in message
    assert error.exit_code == 4


def test_a_flipped_bit_anywhere_is_told_or_harmless(
    tmp_path: Path, key: TuningKey, ok: Ok, caplog: pytest.LogCaptureFixture
) -> None:
    good = filled(tmp_path / "good.sqlite", key, ok(1.0)).read_bytes()
    rng, told = random.Random(0), 0
    schema = [place + 9 for place in range(len(good)) if good.startswith((b"CREATE ", b"TABLE ", b"INDEX "), place)]
    for place in [*schema, *rng.sample(range(len(good)), 100)]:
        flipped = bytearray(good)
        flipped[place] ^= 0x80 if place in schema else 1 << rng.randrange(8)
        path = tmp_path / f"{place}.sqlite"
        path.write_bytes(flipped)
        with Layers.open({"DMUON_TUNE_CACHE_PATH": str(path), "DMUON_TUNE_STARTER": "0"}) as layers:
            layers.entries(None, None)  # a job that trains
        for read_only in (True, False):
            try:
                with Store.open(path, read_only=read_only) as store:
                    contents_of(store)
            except CacheError as error:
                told += 1
                assert_one_useful_line(error, path)
    assert told > len(schema)


def test_a_pipe_is_no_cache_to_wait_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cache.sqlite")
    for read_only in (True, False):
        with pytest.raises(CacheError) as caught:
            Store.open(tmp_path / "cache.sqlite", read_only=read_only)
        assert_one_useful_line(caught.value, tmp_path / "cache.sqlite")
    assert not is_bundle(tmp_path / "cache.sqlite")


def test_a_folder_that_another_process_holds_is_waited_for_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DMUON_TUNE_BUSY_TIMEOUT_S", "0.1")
    with folder_lock(tmp_path), pytest.raises(CacheError, match="locked by another process for more than 0.1 s"):
        Store.open_user(environ={"DMUON_TUNE_CACHE_DIR": str(tmp_path)})
    Store.open_user(environ={"DMUON_TUNE_CACHE_DIR": str(tmp_path)}).close()


def test_nobody_who_waits_for_a_busy_folder_starves(tmp_path: Path) -> None:
    """Sixteen that hold it in turn, with no pause in which asking now and then would succeed."""
    taken = [0] * 16
    end = time.monotonic() + 3

    def hold(place: int) -> None:
        while time.monotonic() < end:
            with folder_lock(tmp_path):
                taken[place] += 1
                time.sleep(0.01)

    threads = [threading.Thread(target=hold, args=(place,)) for place in range(len(taken))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert min(taken) >= 0.25 * sum(taken) / len(taken)


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("corrupt", CORRUPTIONS + OTHERS)
def test_a_corrupt_file_is_refused_and_left_alone(
    tmp_path: Path, key: TuningKey, ok: Ok, corrupt: Callable[[Path], None], read_only: bool
) -> None:
    path = filled(tmp_path / "cache.sqlite", key, ok(1.0))
    corrupt(path)
    before = path.read_bytes()
    with pytest.raises(CacheError) as caught:
        Store.open(path, read_only=read_only)
    assert_one_useful_line(caught.value, path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("corrupt", CORRUPTIONS)
def test_the_users_corrupt_file_is_set_aside(
    tmp_path: Path,
    key: TuningKey,
    ok: Ok,
    corrupt: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    environ = {"DMUON_TUNE_CACHE_DIR": str(tmp_path)}
    path = filled(tmp_path / "cache.sqlite", key, ok(1.0))
    corrupt(path)
    damaged = path.read_bytes()
    with Store.open_user(environ=environ) as store:
        assert store.entries() == []
        store.record(key, {"block": 1}, ok(2.0), {})
    (warning,) = caplog.messages
    assert "\n" not in warning and str(path) in warning and "set aside" in warning
    (aside,) = tmp_path.glob("cache.sqlite.corrupt-*")
    assert aside.read_bytes() == damaged and aside.name in warning
    caplog.clear()
    with Store.open_user(environ=environ) as store:
        assert len(store.entries()) == 1
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("corrupt", "environ"),
    [(corrupt, {}) for corrupt in CORRUPTIONS + OTHERS] + [(other, {"DMUON_TUNE_CACHE_DIR": "."}) for other in OTHERS],
)
def test_a_named_file_and_another_programs_database_are_never_moved(
    tmp_path: Path,
    key: TuningKey,
    ok: Ok,
    corrupt: Callable[[Path], None],
    environ: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = filled(tmp_path / "cache.sqlite", key, ok(1.0))
    corrupt(path)
    before = path.read_bytes()
    with pytest.raises(CacheError) as caught:
        Store.open_user(None if environ else path, environ)
    assert_one_useful_line(caught.value, path)
    assert os.listdir(tmp_path) == ["cache.sqlite"] and path.read_bytes() == before


def test_damage_inside_the_file_is_found_before_tuning(
    tmp_path: Path, key: TuningKey, ok: Ok, damage_trials: Callable[[Path], None]
) -> None:
    path = filled(tmp_path / "cache.sqlite", key, ok(1.0))
    damage_trials(path)
    with Store.open(path, read_only=True) as store:
        with pytest.raises(CacheError, match="truncated or damaged") as caught:
            store.all_trials()
        assert_one_useful_line(caught.value, path)
    with pytest.raises(CacheError, match="damaged"):
        Store.open_user(path)
    assert os.listdir(tmp_path) == ["cache.sqlite"]
    with Store.open_user(environ={"DMUON_TUNE_CACHE_DIR": str(tmp_path)}) as store:
        assert store.all_trials() == []
    assert len(list(tmp_path.glob("*.corrupt-*"))) == 1


@pytest.mark.parametrize("open_store", [Store.open, lambda path: Store.open(path, read_only=True), Store.open_user])
def test_a_newer_schema_is_refused_with_both_versions(
    tmp_path: Path, key: TuningKey, ok: Ok, open_store: Callable[[Path], Store]
) -> None:
    path = filled(tmp_path / "cache.sqlite", key, ok(1.0))
    set_version(path, "7")
    message = f"needs schema version 7, this dmuon-tune supports {SCHEMA_VERSION}; upgrade"
    with pytest.raises(CacheError, match=message) as caught:
        open_store(path)
    assert_one_useful_line(caught.value, path)
    assert os.listdir(tmp_path) == ["cache.sqlite"]


def test_an_older_schema_is_migrated_in_one_transaction(tmp_path: Path, key: TuningKey, ok: Ok) -> None:
    path = filled(tmp_path / "cache.sqlite", key, ok(1.0))
    engine = create_engine(f"sqlite:///{path}")
    column = text("ALTER TABLE dmuon_trials ADD COLUMN energy_j FLOAT")
    steps = {
        SCHEMA_VERSION: lambda connection: connection.execute(column),
        SCHEMA_VERSION + 1: lambda connection: connection.execute(text("UPDATE dmuon_trials SET energy_j = 1.5")),
    }
    newer = SCHEMA_VERSION + 2
    with engine.connect() as connection, pytest.raises(CacheError, match="schema version .*brings it up to date"):
        require_current(connection, str(path), version=newer)
    with engine.begin() as connection:
        prepare(connection, str(path), version=newer, migrations=steps)
    with engine.connect() as connection:
        assert found_version(connection, str(path)) == newer
        assert connection.scalar(text("SELECT sum(energy_j) FROM dmuon_trials")) == 1.5 * ROWS
        require_current(connection, str(path), version=newer)
    with pytest.raises(CacheError, match=f"needs schema version {newer}"):
        Store.open(path)


def schema(path: Path) -> dict[str, object]:
    inspector = inspect(create_engine(f"sqlite:///{path}"))
    return {
        table: (
            sorted(
                (column["name"], column["type"].python_type.__name__, column["nullable"])
                for column in inspector.get_columns(table)
            ),
            sorted(str(found["column_names"]) for found in inspector.get_indexes(table)),
            sorted(str(found["column_names"]) for found in inspector.get_unique_constraints(table)),
            [(found["constrained_columns"], found["referred_table"]) for found in inspector.get_foreign_keys(table)],
        )
        for table in inspector.get_table_names()
    }


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION))
def test_a_file_of_every_released_schema_becomes_the_current_one_and_keeps_all(
    tmp_path: Path, key: TuningKey, ok: Ok, version: int
) -> None:
    """``released/`` holds a cache as that version's own program wrote it."""
    path = tmp_path / "cache.sqlite"
    shutil.copy(RELEASED / f"version-{version}.sqlite", path)
    before, recipe = path.read_bytes(), Recipe(Group(8, 2048, 5464), "gram", "float16", cost_us=90.0)
    with Store.open(path, read_only=True) as store:  # a copy in memory is brought up to date
        assert store.recipes() == [recipe] and len(store.trials(key)) == 3
        assert len(store.chain_trials()) == (version > 1)
        with pytest.raises(CacheError, match="read-only"):
            store.record(key, {}, ok(1.0), {})
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["cache.sqlite"]
    with Store.open(path) as store:
        assert [(trial.config, trial.measurement.status) for trial in store.trials(key)] == [
            ({"block": 64}, "ok"), ({"block": 128}, "ok"), ({"block": 256}, "wrong_result"),
        ]
        best = store.best(key)
        assert best is not None and best.key == key and best.key.validation == "" and best.measurement == ok(
            12.5, smem_bytes=65536
        )
        assert best.validation == "float64 reference"
        assert {entry.key.device.sm_count for entry in store.entries(key.problem)} == {132, 114}
        assert store.recipes() == [recipe] and len(store.chain_trials()) == (version > 1)
        timed = replace(recipe, p20_us=4.0, p80_us=6.0, chunk=2)
        store.put_recipe(key.device, timed)
        store.record_chain(ChainKey(timed, "ab", key.device), ok(5.0), {})
        store.record(replace(key, validation="float64"), {"block": 64}, ok(1.0), {})
        assert store.recipes() == [timed] and len(store.chain_trials()) == 1 + (version > 1)
        assert len(store.entries(key.problem, key.device)) == 2, "how it was checked is a part of the key"
        assert len(contents_of(store).results) == 5
    with Store.open(tmp_path / "new.sqlite"):
        assert schema(path) == schema(tmp_path / "new.sqlite")


def test_an_absent_or_empty_file_is_no_cache_to_read(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    with pytest.raises(CacheError, match="no cache at .*dmuon-tune tune"):
        Store.open(path, read_only=True)
    assert os.listdir(tmp_path) == []
    path.touch()
    with pytest.raises(CacheError, match="is empty"):
        Store.open(path, read_only=True)
    with Store.open(path) as store:
        assert store.counts() == {}


def test_a_folder_is_no_cache(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="is a folder; name a file in it"):
        Store.open(tmp_path)


def test_a_read_only_store_refuses_to_write(tmp_path: Path, key: TuningKey, ok: Ok) -> None:
    path = filled(tmp_path / "cache.sqlite", key, ok(1.0))
    before = path.read_bytes()
    with Store.open(path, read_only=True) as store:
        with pytest.raises(CacheError, match="read-only; set DMUON_TUNE_CACHE_DIR") as caught:
            store.record(key, {}, ok(1.0), {})
        assert_one_useful_line(caught.value, path)
    assert path.read_bytes() == before


def test_a_locked_file_is_refused_after_the_busy_timeout(
    tmp_path: Path, key: TuningKey, ok: Ok, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DMUON_TUNE_BUSY_TIMEOUT_S", "0.2")
    path = filled(tmp_path / "cache.sqlite", key, ok(1.0))
    holder = sqlite3.connect(path, isolation_level=None)
    with Store.open(path) as store:
        holder.execute("BEGIN IMMEDIATE")
        for attempt in (
            lambda: store.record(key, {"block": -1}, ok(0.5), {}),
            lambda: Store.open(path),
            lambda: Store.open_user(path),
        ):
            with pytest.raises(CacheError, match=r"locked .* 0\.2 s; .*DMUON_TUNE_BUSY_TIMEOUT_S") as caught:
                attempt()
            assert_one_useful_line(caught.value, path)
        assert store.counts() == {"ok": ROWS}, "readers do not wait for a writer"
        holder.execute("ROLLBACK")
        store.record(key, {"block": -1}, ok(0.5), {})
    holder.close()
    assert list(tmp_path.glob("*.corrupt-*")) == []


def test_the_switch_to_a_log_waits_for_another_writer(tmp_path: Path, key: TuningKey, ok: Ok) -> None:
    path = filled(tmp_path / "cache.sqlite", key, ok(1.0))
    holder = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.2, holder.execute, ["ROLLBACK"])
    release.start()
    engine = open_engine(path, read_only=False)
    use_wal(engine, str(path))
    with engine.connect() as connection:
        assert connection.scalar(text("PRAGMA journal_mode")) == "wal"
    engine.dispose()
    release.join()
    holder.close()


@pytest.mark.parametrize("value", ["soon", "-1", "nan"])
def test_a_bad_busy_timeout_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("DMUON_TUNE_BUSY_TIMEOUT_S", value)
    with pytest.raises(UsageError, match="must be seconds"):
        Store.open(tmp_path / "cache.sqlite")
    with pytest.raises(UsageError, match="must be seconds"):  # not a reason to leave every layer out
        Layers.open()


@pytest.mark.parametrize("name", NAMES)
def test_any_path_works(tmp_path: Path, key: TuningKey, ok: Ok, name: str) -> None:
    path = filled(tmp_path / name / f"{name}.sqlite", key, ok(1.0))
    for shipped in (False, True):
        with Store.open(str(path), read_only=True, shipped=shipped) as store:
            assert len(store.trials(key)) == ROWS
    assert os.listdir(tmp_path) == [name] and os.listdir(tmp_path / name) == [path.name]


def test_a_shipped_file_needs_no_side_files(tmp_path: Path, key: TuningKey, ok: Ok) -> None:
    path = filled(tmp_path / "cache.sqlite", key, ok(1.0))
    stay_wal(path)
    with Store.open(path, read_only=True, shipped=True) as store:
        assert len(store.trials(key)) == ROWS
        assert os.listdir(tmp_path) == ["cache.sqlite"]


def test_reading_leaves_nothing_behind(tmp_path: Path, key: TuningKey, ok: Ok) -> None:
    path = filled(tmp_path / "cache.sqlite", key, ok(1.0))
    before = path.stat().st_mtime_ns
    for shipped in (False, True):
        with Store.open(path, read_only=True, shipped=shipped) as store:
            assert store.best(key) is not None
            assert os.listdir(tmp_path) == ["cache.sqlite"]
    assert os.listdir(tmp_path) == ["cache.sqlite"] and path.stat().st_mtime_ns == before


@pytest.mark.parametrize("shipped", [False, True])
def test_a_cache_that_is_being_written_is_readable(tmp_path: Path, key: TuningKey, ok: Ok, shipped: bool) -> None:
    path = tmp_path / "cache.sqlite"
    with Store.open(path) as writer:
        writer.record(key, {"block": 0}, ok(1.0), {})
        assert Path(f"{path}-wal").stat().st_size > 0
        with Store.open(path, read_only=True, shipped=shipped) as reader:
            assert len(reader.trials(key)) == 1
            writer.record(key, {"block": 1}, ok(1.0), {})
            assert len(reader.trials(key)) == 2


def test_a_reader_does_not_keep_a_writer_out(tmp_path: Path, key: TuningKey, ok: Ok) -> None:
    path = filled(tmp_path / "cache.sqlite", key, ok(1.0))
    with Store.open(path, read_only=True) as reader:
        assert len(reader.trials(key)) == ROWS
        with Store.open(path) as writer:
            writer.record(key, {"block": ROWS}, ok(1.0), {})
            assert len(reader.trials(key)) == ROWS + 1
        assert len(reader.trials(key)) == ROWS + 1


def test_a_row_that_others_refer_to_cannot_go(tmp_path: Path, key: TuningKey, ok: Ok) -> None:
    with Store.open(filled(tmp_path / "cache.sqlite", key, ok(1.0))) as store:
        with pytest.raises(CacheError, match="FOREIGN KEY"), store._writing() as session:
            session.execute(text("DELETE FROM dmuon_keys"))
        assert len(store.trials(key)) == ROWS


@pytest.mark.parametrize(
    ("url", "error", "hint"),
    [
        ("oracle://u:secret@host/x", UsageError, "postgresql://"),
        ("postgresql://u:secret@host:port/x", UsageError, "malformed"),
        ("postgresql+nodriver://u:secret@host/x", CacheError, "postgres"),
        ("", UsageError, "empty"),
    ],
)
def test_an_unusable_url_is_one_line_without_its_password(url: str, error: type[Exception], hint: str) -> None:
    with pytest.raises(error, match=hint) as caught:
        Store.open(url)
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)


def test_no_warning_for_a_sound_user_cache(
    tmp_path: Path, key: TuningKey, ok: Ok, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {"DMUON_TUNE_CACHE_DIR": str(tmp_path / "new" / "folder")}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with Store.open_user(environ=environ) as store:
                store.record(key, {}, ok(1.0), {})
    assert caplog.messages == [] and (tmp_path / "new" / "folder" / "cache.sqlite").is_file()
