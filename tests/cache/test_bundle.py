"""Bundles and merges: the same bytes for the same contents, nothing lost on the way, every damage told in one line."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon_tune.cache import (
    ArtefactStore,
    ChainKey,
    Contents,
    Store,
    Trial,
    TuningKey,
    conflicts,
    contents_of,
    differences,
    gains,
    is_bundle,
    keep,
    merged,
    opened_bundle,
    retain,
    take_artefacts,
    write_bundle,
)
from dmuon_tune.errors import CacheError, UsageError
from dmuon_tune.measurement import Measurement
from dmuon_tune.portable import PortableCode
from dmuon_tune.recipe import Group, Pick, Recipe

from .conftest import KEY

Ok = Callable[..., Measurement]
GROUP = Group(8, 2048, 5464)


def steps_of(key: TuningKey, other: TuningKey, ok: Ok) -> list[Callable[[Store], None]]:
    """What fills a cache, in any order."""
    pick = Pick(key.problem, key.kernel, {"block": 2}, key.sha256)
    recipe = Recipe(GROUP, "gram", "float16", cost_us=9.0, p20_us=8.0, p80_us=10.0, picks=(pick,))
    how = {"date": "2026-11-30T04:00:00+00:00"}
    return [
        *(lambda store, block=block: store.record(key, {"block": block}, ok(10.0 + block), how) for block in range(4)),
        lambda store: store.record(key, {"block": 9}, Measurement("timeout", log="still running after 60 s"), how),
        lambda store: store.record(other, {"block": 1}, ok(5.0), how),
        lambda store: store.put_recipe(key.device, recipe),
        lambda store: store.put_recipe(other.device, replace(recipe, dtype="bfloat16", picks=())),
        lambda store: store.record_chain(ChainKey(recipe, "code", key.device), ok(9.0), how),
    ]


def fill(path: Path, steps: list[Callable[[Store], None]]) -> Path:
    with Store.open(path) as store:
        for step in steps:
            step(store)
    return path


def bundled(database: Path, bundle: Path) -> bytes:
    with Store.open(database, read_only=True) as store:
        artefacts = ArtefactStore.beside(database)
        write_bundle(bundle, contents_of(store), [(artefacts, artefact) for artefact in artefacts.all()])
    return bundle.read_bytes()


def read(bundle: Path) -> Contents:
    with opened_bundle(bundle) as opened, Store.open(opened.database, read_only=True, shipped=True) as store:
        return contents_of(store)


def test_equal_contents_are_equal_bytes(
    tmp_path: Path, key: TuningKey, other_keys: dict[str, TuningKey], ok: Ok
) -> None:
    steps = steps_of(key, other_keys["device"], ok)
    first = fill(tmp_path / "a" / "cache.sqlite", steps)
    code = PortableCode("any", b"machine code", {"name": "gram"})
    ArtefactStore.beside(first).add(key, {"block": 2}, code)
    expected = bundled(first, tmp_path / "a.bundle")
    time.sleep(0.01)  # other times of recording
    second = fill(tmp_path / "b" / "cache.sqlite", [])
    with Store.open(second) as store:  # other row ids
        store.record(key, {"block": 7}, ok(1.0), {})
        for step in reversed(steps):
            step(store)
        retain(store, lambda contents: contents.kept(lambda result: result.config != {"block": 7}))
        for _ in range(2):
            steps[2](store)
    ArtefactStore.beside(second).add(key, {"block": 2}, code)
    for path in (second, *ArtefactStore.beside(second).folder.iterdir()):
        os.utime(path, (2e9, 2e9))
    assert bundled(second, tmp_path / "b.bundle") == expected
    with opened_bundle(tmp_path / "b.bundle") as opened:
        shutil.copy(opened.database, tmp_path / "c.sqlite")
        (artefact,) = opened.artefacts.all()
        found = [(opened.artefacts, artefact) for artefact in opened.artefacts.all()]
        assert [take_artefacts(ArtefactStore(tmp_path / "artefacts"), found) for _ in range(2)] == [1, 0]
        assert opened.artefacts.read(artefact) == b"machine code" and artefact.config == {"block": 2}
        held = ArtefactStore(tmp_path / "artefacts")
        code_path, record_path = held.files(artefact)
        for path, content in ((code_path, b"other"), (record_path, b"{"), (record_path, b"[" * 100_000)):
            path.write_bytes(content)
            assert len(held.verify()) == 1
            assert take_artefacts(held, found) == 1 and held.verify() == [], "what is damaged is mended"
    assert bundled(tmp_path / "c.sqlite", tmp_path / "c.bundle") == expected, "what came out of it goes into it"
    with tarfile.open(tmp_path / "a.bundle") as tar:
        assert {(member.mtime, member.uid, member.uname) for member in tar} == {(0, 0, "")}
        folders = [name.split("/")[0] for name in tar.getnames()]
        assert folders == ["bundle.json", "artefacts", "artefacts", "cache.sqlite"]
    header = (tmp_path / "c.sqlite").read_bytes()[:20]
    assert header[18:20] == b"\x01\x01", "a rollback journal: readers need no side files"


def test_a_bundle_loses_nothing_but_the_marks_of_where_it_was(
    tmp_path: Path, key: TuningKey, other_keys: dict[str, TuningKey], ok: Ok
) -> None:
    path = fill(tmp_path / "cache.sqlite", steps_of(key, other_keys["device"], ok))
    bundled(path, tmp_path / "x.bundle")
    with Store.open(path) as store:
        original = contents_of(store)
        assert read(tmp_path / "x.bundle") == original.as_shipped()
        assert sorted(result.identity for result in original.results) == [
            result.identity for result in read(tmp_path / "x.bundle").results
        ]
        keep(store, lambda kept: gains(kept, read(tmp_path / "x.bundle").as_imported("x.bundle")))
        assert contents_of(store) == original, "a cache's own results need no import"
    with Store.open(tmp_path / "new.sqlite") as store:
        for _ in range(2):
            keep(store, lambda kept: gains(kept, read(tmp_path / "x.bundle").as_imported("x.bundle")))
            arrived = contents_of(store)
            assert {result.imported for result in arrived.results} == {"x.bundle"}
            assert arrived.as_shipped() == original.as_shipped()
            best = store.best(key)
            assert best is not None and best.config == {"block": 0}
        assert not store.was_measured_here(key.sha256, {"block": 0})
        store.record(key, {"block": 0}, ok(1.0), {})
        assert store.was_measured_here(key.sha256, {"block": 0})
    assert is_bundle(tmp_path / "x.bundle") and not is_bundle(path) and not is_bundle(tmp_path)


def test_only_winners_are_each_keys_best_and_what_recipes_name(
    tmp_path: Path, key: TuningKey, other_keys: dict[str, TuningKey], ok: Ok
) -> None:
    path = fill(tmp_path / "cache.sqlite", steps_of(key, other_keys["device"], ok))
    with Store.open(path, read_only=True) as store:
        found = contents_of(store).only_winners()
    assert sorted((result.key.device.sm_count, result.config["block"]) for result in found.results) == [
        (60, 1), (132, 0), (132, 2),
    ]
    assert len(found.recipes) == 2 and found.chains == ()


def test_what_is_not_kept_takes_its_recipes_and_chains_along(
    tmp_path: Path, key: TuningKey, other_keys: dict[str, TuningKey], ok: Ok
) -> None:
    path = fill(tmp_path / "cache.sqlite", steps_of(key, other_keys["device"], ok))
    with Store.open(path) as store:
        with pytest.raises(ZeroDivisionError):
            retain(store, lambda contents: 1 / 0)  # type: ignore[arg-type, return-value]
        assert len(contents_of(store).results) == 6, "all or nothing"
        retain(store, lambda contents: contents.kept(lambda result: result.key != key))
        store.compact()
        left = contents_of(store)
        assert [result.key.device.sm_count for result in left.results] == [60]
        assert [kept.recipe.dtype for kept in left.recipes] == ["bfloat16"] and left.chains == ()
        assert store.best(key) is None and len(store.entries()) == 1


def damaged_bundles(good: bytes, path: Path) -> dict[str, bytes]:
    """Every kind of file that is no whole bundle, by its name."""

    def tar_of(members: dict[str, bytes], link: bool = False) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name, content in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                if link:
                    member.type, member.linkname, member.size = tarfile.SYMTYPE, "/etc/passwd", 0
                tar.addfile(member, io.BytesIO(content))
        return buffer.getvalue()

    def sparse() -> bytes:
        """Of a member that would be 100 GB in memory."""
        buffer, member = io.BytesIO(), tarfile.TarInfo("cache.sqlite")
        member.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(100 << 30)}
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
            tar.addfile(member)
        return buffer.getvalue()

    def foreign(name: str) -> bytes:
        """A bundle that is sound but for a member that no bundle has."""
        with tarfile.open(fileobj=io.BytesIO(good)) as tar:
            members = {each.name: tar.extractfile(each).read() for each in tar}  # type: ignore[union-attr]
        listed = json.loads(members["bundle.json"])
        listed["sha256"][name] = hashlib.sha256(b"{}").hexdigest()
        return tar_of({**members, "bundle.json": json.dumps(listed).encode(), name: b"{}"})

    manifest = json.dumps({"format": 1, "sha256": {}}).encode()
    return {
        "zero bytes": b"", "text": b"block,median_us\n" * 100, "cut": good[: len(good) // 2], "cut header": good[:300],
        "no manifest": tar_of({"cache.sqlite": b"x"}), "no database": tar_of({"bundle.json": manifest}),
        "newer": tar_of({"bundle.json": b'{"format": 2, "sha256": {}}'}), "no JSON": tar_of({"bundle.json": b"{"}),
        "outside": tar_of({"bundle.json": manifest, "../cache.sqlite": b"x"}),
        "link": tar_of({"bundle.json": b"", "cache.sqlite": b""}, link=True),
        "unlisted": tar_of({"bundle.json": manifest, "cache.sqlite": b"x"}), "sparse": sparse(),
        **{f"foreign {name}": foreign(name) for name in (
            "cache.sqlite-wal", "cache.sqlite-journal", "cache.sqlite/x", "artefacts", "artefacts/a/b.json", "README",
        )},
    }


def test_no_damaged_bundle_is_read(tmp_path: Path, key: TuningKey, other_keys: dict[str, TuningKey], ok: Ok) -> None:
    path = fill(tmp_path / "cache.sqlite", steps_of(key, other_keys["device"], ok))
    good = bundled(path, tmp_path / "x.bundle")
    bad = tmp_path / "bad.bundle"
    for name, content in damaged_bundles(good, bad).items():
        bad.write_bytes(content)
        with pytest.raises(CacheError) as caught, opened_bundle(bad):
            pytest.fail(f"{name} was read")
        said = str(caught.value)
        assert "\n" not in said and str(bad) in said and ";" in said and caught.value.exit_code == 4, (name, said)
    with pytest.raises(CacheError, match="Is a directory"), opened_bundle(tmp_path):
        pass
    changed = 0
    for place in range(0, len(good), len(good) // 20):
        bad.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        try:
            assert read(bad) == read(tmp_path / "x.bundle"), place  # such as of the padding
        except CacheError as error:
            changed += 1
            assert "\n" not in str(error) and str(bad) in str(error)
    assert changed > 10


def test_a_bundle_that_cannot_be_written_leaves_what_was_there(tmp_path: Path, key: TuningKey) -> None:
    with pytest.raises(UsageError, match="cannot write the bundle .*; name a file in a writable folder"):
        write_bundle(tmp_path / "no such folder" / "x.bundle", Contents())
    (tmp_path / "x.bundle").mkdir()
    with pytest.raises(UsageError, match="cannot write the bundle"):
        write_bundle(tmp_path / "x.bundle", Contents())
    assert os.listdir(tmp_path) == ["x.bundle"]


def test_a_temporary_folder_without_room_is_one_line(
    tmp_path: Path, key: TuningKey, other_keys: dict[str, TuningKey], ok: Ok, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fill(tmp_path / "cache.sqlite", steps_of(key, other_keys["device"], ok))
    bundle = tmp_path / "x.bundle"
    bundled(path, bundle)

    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for place, name in ((Path, "write_bytes"), (tempfile, "mkdtemp"), (tempfile, "gettempdir")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, full)
            with pytest.raises(CacheError, match="No space left on device; .*TMPDIR") as caught, opened_bundle(bundle):
                pytest.fail("there was no room")
        assert "\n" not in str(caught.value)


def test_an_interrupt_leaves_no_half_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tarfile.TarFile, "addfile", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_bundle(tmp_path / "x.bundle", Contents())
    assert os.listdir(tmp_path) == []


def outcome(kind: str, median_us: float) -> Measurement:
    if kind == "failed":
        return Measurement("timeout")
    resources: dict[str, Any] = {"disturbed": {"contended": True}, "raced": {"race": {"place": 0}}}.get(kind, {})
    return Measurement.from_samples([median_us], 0.0, resources)


results = st.builds(
    lambda m, block, kind, median_us, by: Trial(
        replace(KEY, problem=replace(KEY.problem, m=m, n=m)), {"block": block}, outcome(kind, median_us), "",
        {"by": by}, "2026-11-30T00:00:00.000+00:00",
    ),
    st.sampled_from((64, 128)), st.integers(0, 2), st.sampled_from(("ok", "failed", "disturbed", "raced")),
    st.sampled_from((1.0, 2.0, 3.0)), st.integers(0, 1),
)
caches = st.lists(results, max_size=6, unique_by=lambda result: result.identity).map(lambda some: Contents(tuple(some)))


@settings(max_examples=50, deadline=None)
@given(st.lists(caches, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_a_union_is_the_same_in_any_order_and_loses_nothing(several: list[Contents], random: Any) -> None:
    union = merged(several)
    assert not gains(union.as_imported("b.bundle"), union.as_imported("a.bundle")).results, "equal under any name"
    shuffled = random.sample(several, len(several))
    assert set(map(repr, merged(shuffled).results)) == set(map(repr, union.results))
    assert merged([union, *several]).results == union.results == merged([union]).results
    assert {result.identity for result in union.results} == {r.identity for cache in several for r in cache.results}
    by_identity = {result.identity: result.measurement for result in union.results}
    for result in (result for cache in several for result in cache.results):
        kept, given_up = by_identity[result.identity], result.measurement
        assert kept.ok or not given_up.ok
        if kept.ok and given_up.ok and kept.disturbed == given_up.disturbed and kept.place == given_up.place:
            assert (kept.median_us or 0.0) <= (given_up.median_us or 0.0)
    assert not gains(union, union).results and not list(differences(union, union))
    assert merged([several[0], gains(several[0], union)]).results == merged([several[0], union]).results
    if len(several) == 1:
        assert not conflicts(several)


def test_conflicts_name_both_sides(key: TuningKey, ok: Ok) -> None:
    def result(block: int, measurement: Measurement) -> Trial:
        return Trial(key, {"block": block}, measurement, "", {}, "")

    one = Contents((result(1, ok(10.0)), result(2, ok(11.0)), result(3, ok(30.0))))
    two = Contents((result(1, ok(12.0)), result(2, ok(9.0)), result(3, Measurement("wrong_result"))))
    found = [(each.about, each.kept, each.other) for each in conflicts([one, two])]
    about = "gram 8x2048x2048x5464 float16 row gram.tilelang"
    assert found == [
        (about, "block=2 9 us", "block=1 10 us"), (about, "block=3 30 us", "block=3 wrong_result"),
    ]
    assert conflicts([one, one]) == []


KILLED = """
import os, sys
from dmuon_tune.cache import opened_bundle
with opened_bundle(sys.argv[1]) as opened:
    os.kill(os.getpid(), 9)
"""


def test_what_a_killed_process_leaves_the_next_one_removes(
    tmp_path: Path, key: TuningKey, ok: Ok, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, temporary = tmp_path / "x.bundle", tmp_path / "tmp"
    bundled(fill(tmp_path / "a.sqlite", steps_of(key, key, ok)), bundle)
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", KILLED, str(bundle)], env=environment).returncode == -signal.SIGKILL
    (left,) = temporary.iterdir()
    with opened_bundle(bundle) as first, opened_bundle(bundle) as second:
        assert not left.exists()
        assert first.database.exists() and second.database.exists() and len(list(temporary.iterdir())) == 2
    assert not list(temporary.iterdir())
