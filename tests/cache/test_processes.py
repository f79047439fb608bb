"""Several processes at once, killed ones, and users without a home."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dmuon_tune.cache import Store, TuningKey
from dmuon_tune.measurement import Measurement

SETUP = """
import json, os, sys, time
from pathlib import Path
from dmuon_tune.cache import Layers, Store, TuningKey
from dmuon_tune.measurement import Measurement
key = TuningKey.from_dict(json.loads(sys.argv[1]))
"""
RECORD_FOREVER = SETUP + """
path, block = sys.argv[2], int(sys.argv[3])
store = Store.open_user(path)
while True:
    store.record(key, {"block": block}, Measurement.from_samples([float(block + 1)] * 30, 0.0, {}), {})
    print(block, flush=True)
    block += 1
"""
CREATE_AND_RECORD = SETUP + """
folder, name = Path(sys.argv[2]), sys.argv[3]
print("ready", flush=True)
for number in range(8):
    while not (folder / f"go{number}").exists():
        time.sleep(0.001)
    with Store.open_user(environ={"DMUON_TUNE_CACHE_DIR": str(folder / f"{number}")}) as store:
        for block in range(5):
            store.record(key, {"by": name, "block": block}, Measurement.from_samples([2.0 + block], 0.0, {}), {})
        store.record(key, {"by": "both"}, Measurement.from_samples([1.0], 0.0, {}), {})
    print(number, flush=True)
"""
AS_STRANGER = SETUP + """
os.setgid(12345)
os.setuid(12345)
folder = Path(sys.argv[2])
for name in ("HOME", "XDG_CACHE_HOME"):
    os.environ.pop(name, None)
os.environ["TMPDIR"] = str(folder / "writable")
def outcome(open_store):
    try:
        with open_store() as store:
            return len(store.trials(key))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
with Layers.open() as layers:
    before = sorted(str(path) for path in folder.rglob("*"))
    shipped = [label for label, entry in layers.entries(key.problem, key.device)]
    untouched = before == sorted(str(path) for path in folder.rglob("*"))
with Store.open_user() as store:
    store.record(key, {"block": 1}, Measurement.from_samples([1.0], 0.0, {}), {})
with Layers.open() as layers:
    after = [label for label, entry in layers.entries(key.problem, key.device)]
print(json.dumps({
    "shipped": shipped, "untouched": untouched, "after": after, "where": store.where,
    "read": outcome(lambda: Store.open(folder / "cache.sqlite", read_only=True)),
    "write": outcome(lambda: Store.open(folder / "cache.sqlite")),
    "create": outcome(lambda: Store.open(folder / "new.sqlite")),
    "folder": outcome(lambda: Store.open_user(folder / "sub" / "cache.sqlite")),
    "hidden": outcome(lambda: Store.open_user(folder / "hidden" / "cache.sqlite")),
}))
"""


def test_a_kill_loses_at_most_the_trial_under_way(tmp_path: Path, key: TuningKey, spawn: Callable[..., Any]) -> None:
    path = tmp_path / "cache.sqlite"
    begin = 0
    for lines in (1, 7, 20):
        process = spawn(RECORD_FOREVER, json.dumps(key.to_dict()), path, begin)
        reported = [int(process.stdout.readline()) for _ in range(lines)]
        process.kill()
        reported += [int(line) for line in process.stdout]
        with Store.open(path, read_only=True) as store:
            kept = sorted(trial.config["block"] for trial in store.trials(key))
        assert kept in (list(range(reported[-1] + 1)), list(range(reported[-1] + 2)))
        begin = len(kept)
    with Store.open_user(path) as store:
        entry = store.best(key)
        assert entry is not None and entry.config == {"block": 0}
    assert sorted(os.listdir(tmp_path)) == ["cache.sqlite"]
    assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.parametrize("begins_corrupt", [False, True])
def test_processes_may_create_and_record_at_once(
    tmp_path: Path, key: TuningKey, spawn: Callable[..., Any], begins_corrupt: bool
) -> None:
    if begins_corrupt:
        for number in range(8):
            (tmp_path / f"{number}").mkdir()
            (tmp_path / f"{number}" / "cache.sqlite").write_text("not a cache" * 1000)
    processes = [spawn(CREATE_AND_RECORD, json.dumps(key.to_dict()), tmp_path, name) for name in "abc"]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 3
    for number in range(8):
        (tmp_path / f"go{number}").touch()
        assert [process.stdout.readline() for process in processes] == [f"{number}\n"] * 3, [
            process.stderr.read() for process in processes if process.poll()
        ]
    for number in range(8):
        with Store.open(tmp_path / f"{number}" / "cache.sqlite", read_only=True) as store:
            configs = [(trial.config["by"], trial.config.get("block")) for trial in store.trials(key)]
            entry = store.best(key)
        assert len(configs) == 16 and {by for by, _ in configs} == {"a", "b", "c", "both"}
        assert entry is not None and entry.config == {"by": "both"}
    assert len(list(tmp_path.glob("*/*.corrupt-*"))) == (8 if begins_corrupt else 0)
    assert [process.wait(10) for process in processes] == [0, 0, 0]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may read, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="dmuon-tune-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_user_without_home_or_passwd_entry(
    open_folder: Path, key: TuningKey, ok: Callable[..., Measurement], spawn: Callable[..., Any]
) -> None:
    with Store.open(open_folder / "cache.sqlite") as store:
        store.record(key, {"block": 0}, ok(3.0), {})
    connection = sqlite3.connect(open_folder / "cache.sqlite")
    connection.execute("PRAGMA journal_mode=WAL")  # needs side files, which the stranger cannot make
    connection.close()
    for name, mode in (("writable", 0o777), ("hidden", 0o700)):
        (open_folder / name).mkdir()
        (open_folder / name).chmod(mode)
    process = spawn(
        AS_STRANGER, json.dumps(key.to_dict()), open_folder, DMUON_TUNE_CACHE_PATH=str(open_folder / "cache.sqlite")
    )
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and errors == "", errors
    found = json.loads(output)
    assert (found["shipped"], found["untouched"], found["after"]) == (["path"], True, ["path", "user"])
    assert found["where"] == str(open_folder / "writable" / "dmuon-tune-12345" / "cache.sqlite")
    assert found["read"] == 1
    for attempt in ("write", "create", "folder", "hidden"):
        assert found[attempt].startswith("CacheError: ") and "\n" not in found[attempt], found[attempt]
        assert str(open_folder) in found[attempt] and "set DMUON_TUNE_CACHE_DIR to" in found[attempt], found[attempt]
    assert sorted(os.listdir(open_folder)) == ["cache.sqlite", "hidden", "writable"]
