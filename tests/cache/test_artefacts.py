"""The artefact store: whole files under many writers, checked by digest, read from folders that cannot be written."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dmuon_tune.cache import TuningKey
from dmuon_tune.cache.artefacts import ArtefactError, ArtefactStore, artefact_id, artefacts_folder
from dmuon_tune.portable import PortableCode

CONFIG = {"tile_m": 128, "stages": 4}
CODE = PortableCode("shared-library", bytes(range(256)) * 8, {"symbol": "call", "arguments": ["tensor", "float32"]})
BUILDERS = """
import json, os, sys, time
from dmuon_tune.cache import TuningKey
from dmuon_tune.cache.artefacts import ArtefactStore
from dmuon_tune.portable import PortableCode
store, key = ArtefactStore(sys.argv[1]), TuningKey.from_dict(json.loads(sys.argv[2]))
def build(builder):
    for number in range(6):
        with store.building(key.sha256, {"tile": number}) as mine:
            assert mine
            if store.find(key.sha256, {"tile": number}) is None:
                time.sleep(0.02)
                store.add(key, {"tile": number}, PortableCode("shared-library", bytes([number]) * 200_000, {}))
                print(number, flush=True)
        assert store.read(store.find(key.sha256, {"tile": number})) == bytes([number]) * 200_000
children = []
for builder in range(8):
    children.append(os.fork())
    if not children[-1]:
        try:
            build(builder)
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
sys.exit(max(os.waitpid(child, 0)[1] for child in children))
"""


@pytest.fixture
def store(tmp_path: Path) -> ArtefactStore:
    return ArtefactStore(tmp_path / "ein Ordner-ü" / "artefacts")


def test_what_is_added_is_found_as_it_was(store: ArtefactStore, key: TuningKey) -> None:
    assert store.find(key.sha256, CONFIG) is None and store.all() == [] and not store.folder.exists()
    added = store.add(key, CONFIG, CODE)
    for found in (store.find(key.sha256, CONFIG), store.find(key.sha256), *store.all()):
        assert found == added
    assert store.read(added) == CODE.data and added.launch == CODE.launch and added.arch == "sm_90"
    assert store.find(key.sha256, {**CONFIG, "stages": 5}) is None
    assert sorted(path.name for path in store.folder.iterdir()) == sorted(path.name for path in store.files(added))
    assert store.verify() == []


def test_every_part_of_the_key_and_the_configuration_make_another_artefact(
    key: TuningKey, other_keys: dict[str, TuningKey]
) -> None:
    ids = {artefact_id(each.sha256, CONFIG) for each in (key, *other_keys.values())}
    assert len(ids | {artefact_id(key.sha256, {**CONFIG, "stages": 5})}) == len(other_keys) + 2
    assert artefact_id(key.sha256, dict(reversed(CONFIG.items()))) == artefact_id(key.sha256, CONFIG)


def test_equal_code_is_kept_once_and_goes_with_its_last_record(store: ArtefactStore, key: TuningKey) -> None:
    first, second = store.add(key, CONFIG, CODE), store.add(replace(key, kernel="gram.library"), CONFIG, CODE)
    assert len(list(store.folder.glob("*.bin"))) == 1
    store.remove(first)
    assert store.find(key.sha256, CONFIG) is None and store.read(second) == CODE.data
    store.remove(second)
    assert list(store.folder.iterdir()) == []


def test_the_same_artefact_twice_gives_the_same_bytes(store: ArtefactStore, key: TuningKey, tmp_path: Path) -> None:
    other = ArtefactStore(tmp_path / "other")
    files = [[path.read_bytes() for path in each.files(each.add(key, CONFIG, CODE))] for each in (store, other)]
    assert files[0] == files[1]


def truncate(code: Path, record: Path) -> None:
    code.write_bytes(code.read_bytes()[:-1])


def flip_a_bit(code: Path, record: Path) -> None:
    data = bytearray(code.read_bytes())
    data[1000] ^= 4
    code.write_bytes(data)


def lose_the_code(code: Path, record: Path) -> None:
    code.unlink()


def cut_the_record(code: Path, record: Path) -> None:
    record.write_bytes(record.read_bytes()[:-5])


def empty_the_record(code: Path, record: Path) -> None:
    record.write_bytes(b"")


def change_the_key(code: Path, record: Path) -> None:
    fields = json.loads(record.read_bytes())
    fields["key"]["problem"]["m"] += 1
    record.write_text(json.dumps(fields))


def ask_for_a_newer_version(code: Path, record: Path) -> None:
    record.write_text(json.dumps({**json.loads(record.read_bytes()), "version": 2}))


def name_a_foreign_file(code: Path, record: Path) -> None:
    record.write_text(json.dumps({**json.loads(record.read_bytes()), "sha256": "../" * 21 + "x"}))


def put_a_folder_there(code: Path, record: Path) -> None:
    record.unlink()
    record.mkdir()


@pytest.mark.parametrize(
    "damage",
    [truncate, flip_a_bit, lose_the_code, cut_the_record, empty_the_record, change_the_key, ask_for_a_newer_version,
     name_a_foreign_file, put_a_folder_there],
)
def test_damage_is_said_in_one_line_and_mended_by_building_again(
    damage: Callable[[Path, Path], None], store: ArtefactStore, key: TuningKey
) -> None:
    whole = store.add(replace(key, kernel="gram.library"), CONFIG, PortableCode("shared-library", b"whole", {}))
    damage(*store.files(store.add(key, CONFIG, CODE)))
    with pytest.raises(ArtefactError) as raised:
        found = store.find(key.sha256, CONFIG)
        assert found is not None
        store.read(found)
    assert len(str(raised.value).splitlines()) == 1 and str(store.folder) in str(raised.value)
    assert len(store.verify()) == 1 and whole in store.all()
    if damage is not put_a_folder_there:
        assert store.read(store.add(key, CONFIG, CODE)) == CODE.data and store.verify() == []


def test_eight_cold_processes_build_each_artefact_once(
    store: ArtefactStore, key: TuningKey, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    process = spawn(BUILDERS, store.folder, json.dumps(key.to_dict()))
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and not errors, errors
    assert sorted(map(int, out.split())) == list(range(6))
    assert store.verify() == [] and len(store.all()) == 6
    assert not [path for path in store.folder.iterdir() if path.name.startswith(".new-")]


def test_a_builder_that_dies_gives_its_artefact_back(
    store: ArtefactStore, key: TuningKey, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    holder = spawn(
        "import sys, time\nfrom dmuon_tune.cache.artefacts import ArtefactStore\n"
        "with ArtefactStore(sys.argv[1]).building(sys.argv[2], {}):\n    print('held', flush=True)\n    time.sleep(60)",
        store.folder, key.sha256,
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with store.building(key.sha256, {}, wait=False) as mine:
        assert not mine
    with store.building(key.sha256, CONFIG, wait=False) as mine:  # another artefact is free
        assert mine
    holder.kill()
    with store.building(key.sha256, {}) as mine:
        assert mine


@pytest.mark.skipif(os.getuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_read_and_says_that_it_cannot_be_written(store: ArtefactStore, key: TuningKey) -> None:
    added = store.add(key, CONFIG, CODE)
    store.folder.chmod(0o555)
    try:
        assert store.read(added) == CODE.data and store.verify() == []
        with pytest.raises(ArtefactError, match="build in a writable folder"):
            store.add(key, {}, CODE)
    finally:
        store.folder.chmod(0o755)


def test_artefacts_lie_beside_the_file_and_a_servers_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DMUON_TUNE_CACHE_DIR", str(tmp_path / "mine"))
    assert artefacts_folder(tmp_path / "a.sqlite") == tmp_path / "artefacts"
    assert artefacts_folder("postgresql://u:p@host/db") == tmp_path / "mine" / "artefacts"


def test_what_killed_processes_left_is_swept_once_it_is_old(store: ArtefactStore, key: TuningKey) -> None:
    code = PortableCode("any", b"old code", {})
    old, new = store.add(key, {"block": 1}, code), store.add(key, {"block": 1}, replace(code, data=b"new code"))
    left = [store.files(old)[0], store.folder / ".new-abc", store.folder / ".new-young"]
    for path in left:
        path.write_bytes(b"old code")
    for path in (*left[:2], *store.files(new)):
        os.utime(path, (1e9, 1e9))
    store.sweep()
    assert [path.exists() for path in left] == [False, False, True]
    assert store.read(new) == b"new code" and store.verify() == []
    left[0].write_bytes(b"old code")
    os.utime(left[0], (1e9, 1e9))
    store.add(key, {"block": 2}, code)  # what is there serves, and is a leftover no more before its record is written
    assert left[0].stat().st_mtime > 1e9
