"""``cache export``, ``import``, ``merge``, ``diff``, ``prune``, ``verify`` and ``list --layers``; damaged files."""

from __future__ import annotations

import io
import json
import os
import sqlite3
import tarfile
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from dmuon_tune import kernel_specs
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import ArtefactStore, Store, TuningKey
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measurement import Measurement
from dmuon_tune.portable import PortableCode
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, Recipe, chain
from dmuon_tune.runtime import Muon

from .conftest import Run

GROUP = Group(1, 16, 64)
PROBLEMS = tuple(chain(GROUP, "gram", "float32"))


def key_of(problem: Problem) -> TuningKey:
    return tuning_key(kernel_specs.kernel(f"{problem.op}.library"), problem, fingerprint("cpu"))


def tuned(path: Path, median_us: float = 10.0, entry: str = "addmm") -> Path:
    """A cache of this device with a winner, a failure and a stale result for each product of a small chain."""
    with Store.open(path) as store:
        for problem in PROBLEMS:
            key = key_of(problem)
            store.record(key, {"entry": entry}, Measurement.from_samples([median_us], 1e-6, {}), {"by": "test"})
            store.record(key, {"entry": "bmm"}, Measurement("timeout"), {})
        stale = replace(key_of(PROBLEMS[0]), spec_digest="00" * 32)
        store.record(stale, {"entry": entry}, Measurement.from_samples([1.0], 1e-6, {}), {})
        store.put_recipe(fingerprint("cpu"), Recipe(GROUP, "gram", "float32", cost_us=7 * median_us))
    ArtefactStore.beside(path).add(key_of(PROBLEMS[0]), {"entry": entry}, PortableCode("any", b"code", {}))
    return path


def test_a_cache_travels_in_one_file(
    own_cache: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(own_cache)
    bundle = tmp_path / "muon h200.bundle"
    whole = run("cache", "export", str(bundle), "--format", "json")
    assert whole.code == 0 and {name: whole.json[name] for name in ("results", "winners", "recipes", "artefacts")} == {
        "results": 7, "winners": 4, "recipes": 1, "artefacts": 1,
    }
    winners = run("cache", "export", str(tmp_path / "w.bundle"), "--only", "winners", "--format", "json").json
    assert (winners["results"], winners["recipes"], winners["chains"]) == (4, 1, 0)
    monkeypatch.setenv("DMUON_TUNE_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert run("cache", "export", str(bundle)).code == 4, "no cache yet"
    first, second = (run("cache", "import", str(bundle), "--format", "json").json for _ in range(2))
    assert (first["results"], first["artefacts"], first["unchanged"]) == (7, 1, 0)
    assert (second["results"], second["artefacts"], second["unchanged"]) == (0, 0, 7)
    listed = run("cache", "list", "--layers", "--format", "json").json
    assert listed["layers"][0]["entries"] == 4
    assert {(entry["layer"], entry["imported"], entry["hidden_by"]) for entry in listed["entries"]} == {
        ("user", "muon h200.bundle", None)
    }
    assert run("cache", "diff", str(bundle), str(tmp_path / "elsewhere" / "cache.sqlite"), "--format", "json").json == {
        "differences": []
    }
    again = tmp_path / "again.bundle"
    assert run("cache", "export", str(again)).code == 0 and again.read_bytes() == bundle.read_bytes()
    explained = run("explain", "--shapes", "1x16x64", "--device", "cpu", "--format", "json").json
    assert {(row["origin"], row["layer"]) for row in explained["products"]} == {("tuned", "user")}


def test_nothing_but_a_bundle_is_replaced(own_cache: Path, tmp_path: Path, run: Run) -> None:
    tuned(own_cache)
    before, bundle = own_cache.read_bytes(), tmp_path / "x.bundle"
    (tmp_path / "notes.txt").write_text("mine")
    os.mkfifo(tmp_path / "fifo")
    with tarfile.open(tmp_path / "backup.tar", "w") as tar:
        tar.add(tmp_path / "notes.txt", "notes.txt")
    backup = (tmp_path / "backup.tar").read_bytes()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for place in (*(tmp_path / name for name in ("notes.txt", "fifo", "backup.tar", "circle")), own_cache, tmp_path):
        for command in (("export", str(place)), ("merge", str(own_cache), "--out", str(place))):
            done = run("cache", *command)
            assert done.code == 2 and "no bundle" in done.err and done.err.count("\n") == 1
    assert own_cache.read_bytes() == before and (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "fifo").is_fifo() and (tmp_path / "backup.tar").read_bytes() == backup
    assert run("cache", "import", str(tmp_path / "fifo")).code == 4
    assert run("cache", "export", str(bundle)).code == run("cache", "export", str(bundle)).code == 0
    link = tmp_path / "link.bundle"
    link.symlink_to(bundle)
    assert run("cache", "export", str(link), "--only", "winners").code == 0 and link.is_symlink()
    assert run("cache", "export", str(tmp_path / "w.bundle"), "--only", "winners").code == 0
    assert bundle.read_bytes() == (tmp_path / "w.bundle").read_bytes()


def test_a_damaged_database_in_a_bundle_is_named_by_the_bundle(own_cache: Path, tmp_path: Path, run: Run) -> None:
    bundle = tmp_path / "x.bundle"
    with tarfile.open(bundle, "w", format=tarfile.USTAR_FORMAT) as tar:
        manifest = {"format": 1, "sha256": {"cache.sqlite": sha256(b"junk").hexdigest()}}
        for name, content in (("bundle.json", json.dumps(manifest).encode()), ("cache.sqlite", b"junk")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    done = run("cache", "import", str(bundle))
    assert done.code == 4 and f"bundle {bundle}" in done.err and "/dmuon-tune-" not in done.err
    assert not own_cache.exists()


def test_what_is_not_there_is_no_cache_to_be_tuned(own_cache: Path, tmp_path: Path, run: Run) -> None:
    none = str(tmp_path / "none.bundle")
    for command in (("import", none), ("merge", none, "--out", none), ("diff", none, none), ("verify", none)):
        done = run("cache", *command)
        assert done.code == 4 and f"there is no {none}; name a bundle" in done.err and "dmuon-tune tune" not in done.err
    assert not own_cache.exists()


def test_a_packages_cache_is_taken_by_its_name(
    own_cache: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DMUON_TUNE_STARTER", "0")  # of training
    taken = run("cache", "import", "starter-h200", "--format", "json")
    assert taken.code == 0 and taken.json["results"] > 0 and taken.json["recipes"] > 0
    assert "no difference" in run("cache", "diff", "starter-h200", str(own_cache)).err
    with Store.open(own_cache) as store:
        assert {trial.imported for trial in store.all_trials()} == {"starter-h200"}
    info = tmp_path / "site" / "broken-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dmuon_tune.caches]\nbroken = nowhere_at_all:cache\n")
    monkeypatch.syspath_prepend(info.parent)
    broken = run("cache", "import", "broken")
    assert broken.code == 4 and "the package that ships the cache broken cannot say where it is" in broken.err


@pytest.mark.parametrize("suffix", [".json", ".bin"])
def test_nothing_is_taken_of_what_has_a_wrong_artefact(
    own_cache: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """One file has another's name, by a manifest that is right."""
    tuned(own_cache)
    bundle = tmp_path / "x.bundle"
    assert run("cache", "export", str(bundle)).code == 0
    with tarfile.open(bundle) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    (name,) = (name for name in files if name.endswith(suffix) and "/" in name)
    files[f"artefacts/{'ab' * 32}{suffix}"] = files.pop(name)
    digests = {name: sha256(content).hexdigest() for name, content in files.items() if name != "bundle.json"}
    files["bundle.json"] = json.dumps({"format": 1, "sha256": digests}).encode()
    with tarfile.open(bundle, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    monkeypatch.setenv("DMUON_TUNE_CACHE_DIR", str(tmp_path / "elsewhere"))
    done = run("cache", "import", str(bundle))
    assert done.code == 4 and done.err.count("\n") == 1 and f"bundle {bundle} is damaged: " in done.err
    assert "nothing was taken" in done.err and "/dmuon-tune-" not in done.err
    assert not (tmp_path / "elsewhere").exists()


def test_layers_say_which_entries_another_layer_hides(
    own_cache: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(own_cache)
    monkeypatch.setenv("DMUON_TUNE_CACHE_PATH", str(tuned(tmp_path / "image.sqlite")))
    table = run("cache", "list", "--layers")
    assert table.code == 0 and "hidden_by" in table.out
    entries = run("cache", "list", "--layers", "--format", "json").json["entries"]
    found = sorted((entry["layer"], entry["hidden_by"]) for entry in entries)
    assert found == [("path", None)] * 4 + [("user", "path")] * 4


def test_a_merge_lists_conflicts_and_keeps_the_better(tmp_path: Path, run: Run) -> None:
    tuned(tmp_path / "a.sqlite", 10.0), tuned(tmp_path / "b" / "b.sqlite", 9.0, "baddbmm")
    bundles = []
    for order in (("a.sqlite", "b/b.sqlite"), ("b/b.sqlite", "a.sqlite")):
        out = tmp_path / f"{len(bundles)}.bundle"
        found = run("cache", "merge", *(str(tmp_path / name) for name in order), "--out", str(out), "--format", "json")
        assert found.code == 0 and (found.json["winners"], found.json["artefacts"]) == (4, 2)
        differing = {(each["kept"], each["other"]) for each in found.json["conflicts"]}
        assert ("entry=baddbmm 9 us", "entry=addmm 10 us") in differing
        bundles.append(out.read_bytes())
    assert bundles[0] == bundles[1]
    table = run("cache", "merge", str(tmp_path / "0.bundle"), str(tmp_path / "a.sqlite"), "--out", str(tmp_path / "x"))
    assert "entry=addmm 10 us" in table.out and (tmp_path / "x").read_bytes() == bundles[0]
    differing = run("cache", "diff", str(tmp_path / "a.sqlite"), str(tmp_path / "0.bundle"))
    assert differing.code == 0 and "entry=baddbmm 9 us" in differing.out


def test_pruning_deletes_what_no_longer_serves(own_cache: Path, run: Run) -> None:
    tuned(own_cache)
    for kernel in ("gram.library", "gram.gone"):  # of a chain's ends there are artefacts without results
        other = replace(key_of(PROBLEMS[0]), kernel=kernel)
        ArtefactStore.beside(own_cache).add(other, {"of": "an end"}, PortableCode("any", b"code", {}))
    assert run("cache", "prune").code == 2
    before = own_cache.read_bytes()
    tried = run("cache", "prune", "--stale", "--failures", "--dry-run", "--format", "json").json
    assert tried["deleted"]["results"] == 4 and own_cache.read_bytes() == before
    done = run("cache", "prune", "--stale", "--failures", "--format", "json").json
    assert {**done, "dry_run": True} == tried and done["left"]["results"] == done["left"]["winners"] == 3
    assert done["deleted"]["artefacts"] == 1 and len(ArtefactStore.beside(own_cache).all()) == 2
    with Store.open(own_cache, read_only=True) as store:
        assert store.counts() == {"ok": 3} and len(store.recipes()) == 1
    assert run("cache", "prune", "--losers").code == 0


@pytest.mark.parametrize("command", [
    "list", "show", "prune --losers", "build", "tune --preset tiny --device cpu", "import {}", "explain --preset tiny",
])
def test_a_bundle_in_a_caches_place_is_named_as_one(own_cache: Path, tmp_path: Path, run: Run, command: str) -> None:
    bundle = str(tmp_path / "x.bundle")
    assert run("cache", "export", bundle, "--cache", str(tuned(own_cache))).code == 0
    words = command.format(bundle).split()
    of_caches = words[0] in ("list", "prune", "build", "import")
    done = run(*(["cache"] if of_caches else []), *words, "--cache", bundle)
    assert (done.code, done.out, done.err.count("\n")) == (4, "", 1)
    assert f"{bundle} is a bundle, not a cache; take it with 'dmuon-tune cache import'" in done.err


def test_prune_leaves_the_compiled_kernels_of_a_cache_beside(own_cache: Path, run: Run) -> None:
    """Caches of one folder, and servers, share the folder of artefacts."""
    beside = own_cache.with_name("other.sqlite")
    for path in (tuned(own_cache), tuned(beside)):
        with Store.open(path) as store:
            loser = Measurement.from_samples([99.0 if path == own_cache else 1.0], 1e-6, {})
            store.record(key_of(PROBLEMS[1]), {"entry": "baddbmm"}, loser, {})
    (own_cache.parent / "damaged.sqlite").write_text("no cache")
    folder = ArtefactStore.beside(own_cache)
    folder.add(key_of(PROBLEMS[1]), {"entry": "baddbmm"}, PortableCode("any", b"of the other's winner", {}))
    done = run("cache", "prune", "--losers", "--format", "json")
    assert done.code == 0 and done.json["deleted"] == {
        "results": 1, "winners": 0, "recipes": 0, "chains": 0, "artefacts": 0,
    }
    assert len(folder.all()) == 2
    assert done.err.count("damaged.sqlite names count as this cache's, since it cannot be read") == 1
    beside.unlink()
    with Store.open(own_cache) as store:
        store.record(key_of(PROBLEMS[1]), {"entry": "baddbmm"}, Measurement.from_samples([99.0], 1e-6, {}), {})
    assert run("cache", "prune", "--losers", "--format", "json").json["deleted"]["artefacts"] == 1
    assert [each.key for each in folder.all()] == [key_of(PROBLEMS[0])]


@pytest.mark.parametrize("by", ["export", "import"])
def test_the_compiled_kernels_of_a_cache_beside_stay_there(
    own_cache: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    tuned(own_cache)
    with Store.open(own_cache.with_name("other.sqlite")) as store:
        store.record(key_of(PROBLEMS[1]), {"entry": "other"}, Measurement.from_samples([1.0], 1e-6, {}), {})
    folder, end = ArtefactStore.beside(own_cache), replace(key_of(PROBLEMS[0]), kernel="end.library")
    for key, config in ((key_of(PROBLEMS[1]), {"entry": "other"}), (end, {"of": "an end"})):
        folder.add(key, config, PortableCode("any", json.dumps(config).encode(), {}))
    (own_cache.parent / "nowhere.sqlite").symlink_to("not-there")
    (foreign,) = (each for each in folder.all() if each.config == {"entry": "other"})
    folder.files(foreign)[0].write_bytes(b"not what its digest says")
    if by == "export":
        own_cache = tmp_path / "one.bundle"
        assert run("cache", "export", str(own_cache)).code == 0
    else:
        monkeypatch.setenv("DMUON_TUNE_CACHE_DIR", str(tmp_path / "elsewhere"))
    taken = run("cache", "import", str(own_cache), "--cache", str(tmp_path / "new" / "c.sqlite"), "--format", "json")
    assert taken.json["artefacts"] == 2 and "warning" not in taken.err, "a link that leads nowhere is no cache"
    assert {each.key for each in ArtefactStore.beside(tmp_path / "new" / "c.sqlite").all()} == {
        key_of(PROBLEMS[0]), end
    }


def test_verify_checks_and_times_what_is_of_this_device(own_cache: Path, tmp_path: Path, run: Run) -> None:
    tuned(own_cache, 1e9)
    with Store.open(own_cache) as store:
        other = key_of(replace(PROBLEMS[0], k=65))
        store.record(other, {"no": "entry"}, Measurement.from_samples([1e9], 1e-6, {}), {})
    found = run("cache", "verify", "--all", "--device", "cpu", "--format", "json")
    results = {result["problem"]["k"]: result for result in found.json["results"]}
    assert found.code == 1 and results[65]["verdict"].startswith("compile_error: ValueError")
    right = [result for result in found.json["results"] if result["verdict"] == "ok"]
    assert len(right) == 3 and all(result["now_us"] < result["kept_us"] == 1e9 for result in right)
    assert list(found.json["skipped"].values()) == [1] and "other digest" in next(iter(found.json["skipped"]))
    assert len(list((own_cache.parent / "checked").iterdir())) == 3
    with Store.open(tmp_path / "other.sqlite") as store:
        store.record(replace(other, spec_digest="00" * 32), {}, Measurement.from_samples([1.0], 1e-6, {}), {})
    assert run("cache", "verify", str(tmp_path / "other.sqlite"), "--device", "cpu").code == 0
    assert run("cache", "verify", "x", "--cache", "y").code == 2


def test_explain_names_the_field_in_which_the_nearest_entries_differ(own_cache: Path, run: Run) -> None:
    tuned(own_cache)
    found = run("explain", "--shapes", "1x16x64", "--device", "cpu", "--dtype", "bf16", "--format", "json").json
    verdicts = [row["verdict"] for row in found["candidates"] if row["config"]]
    assert "other dtype: float32, here bfloat16, out_dtype: float32, here bfloat16" in verdicts
    wider = run("explain", "--shapes", "2x16x64", "--device", "cpu", "--format", "json").json
    assert any(row["verdict"] == "other batch: 1, here 2" for row in wider["candidates"])


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5000])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def text(path: Path) -> None:
    path.write_text("block_m,median_us\n128,12.5\n" * 100)


def newer(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("UPDATE dmuon_meta SET value = '99'")
    connection.commit()
    connection.close()


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "note").touch()


def train() -> None:
    """One step, whatever the caches are."""
    weight = torch.nn.Parameter(torch.randn(16, 64))
    weight.grad = torch.randn(16, 64)
    before = weight.detach().clone()
    Muon([weight], lr=0.1).step()
    assert not torch.equal(weight, before) and torch.isfinite(weight).all()


@pytest.mark.parametrize("damage", [truncated, emptied, text, newer, folder])
@pytest.mark.parametrize("layer", ["user", "path"])
def test_a_damaged_cache_is_one_line_and_training_goes_on(
    own_cache: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None],
    layer: str,
) -> None:
    path = own_cache if layer == "user" else tmp_path / "shipped.sqlite"
    damage(tuned(path))
    if layer == "path":
        monkeypatch.setenv("DMUON_TUNE_CACHE_PATH", str(path))
    for command in (
        ["list", "--cache", str(path)], ["export", str(tmp_path / "x.bundle"), "--cache", str(path)],
        ["diff", str(path), str(path)], ["merge", str(path), "--out", str(tmp_path / "x.bundle")],
        ["verify", str(path), "--device", "cpu"], ["prune", "--losers", "--cache", str(path)], ["list"],
    ):
        found = run("cache", *command)
        assert found.code == 4, (command, found.err)
        (line,) = [line for line in found.err.splitlines() if "warning: no tuned kernel" not in line]
        assert str(path) in line and ";" in line and "Traceback" not in line
    train()
    assert not (tmp_path / "x.bundle").exists()


def test_a_flipped_bit_is_found_or_stops_nothing(
    own_cache: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tuned(tmp_path / "shipped.sqlite")
    good = path.read_bytes()
    monkeypatch.setenv("DMUON_TUNE_CACHE_PATH", str(path))
    found = 0
    for number in range(20):
        place = (2 * number + 1) * len(good) // 40
        path.write_bytes(good[:place] + bytes([good[place] ^ 1 << number % 8]) + good[place + 1 :])
        exported = run("cache", "export", str(tmp_path / "x"), "--cache", str(path))
        assert exported.code in (0, 4) and "Traceback" not in exported.err, place
        if exported.code:
            found += 1
            assert exported.err.count("\n") == 1 and str(path) in exported.err
            if found % 4 == 1:
                assert run("cache", "list").code in (0, 4)
                train()
    assert found


def test_every_odd_name_works(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(tmp_path / "a.sqlite")
    for name in ("größe 中文", "a b%20?#", "-x"):
        bundle = tmp_path / name / "x.bundle"
        bundle.parent.mkdir()
        assert run("cache", "export", str(bundle), "--cache", str(tmp_path / "a.sqlite")).code == 0
        target = tmp_path / name / "cache.sqlite"
        taken: Any = run("cache", "import", str(bundle), "--cache", str(target), "--format", "json").json
        assert taken["results"] == 7
        monkeypatch.setenv("DMUON_TUNE_CACHE_PATH", str(target))
        assert run("cache", "list", "--format", "json").json["caches"][0]["layer"] == "path"
