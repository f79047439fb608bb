"""Layers: their order, the first hit, packages' entry points, and bad layers that stop nothing."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dmuon_tune.cache import Layers, Store, TuningKey, user_cache_path
from dmuon_tune.cache.paths import site_cache_paths
from dmuon_tune.measurement import Measurement
from dmuon_tune.recipe import Group, Recipe

Ok = Callable[..., Measurement]
GROUP = Group(8, 2048, 5464)


def ship(path: Path, key: TuningKey, measurement: Measurement, steps: int) -> Path:
    with Store.open(path) as store:
        store.record(key, {"steps": steps}, measurement, {})
        store.put_recipe(key.device, Recipe(GROUP, "gram", "float16", steps=steps))
    return path


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {
        "HOME": str(tmp_path / "home"),
        "XDG_DATA_DIRS": f"{tmp_path / 'site a'}:relative:{tmp_path / 'site_b'}",
        "DMUON_TUNE_CACHE_PATH": f"{tmp_path / 'one.sqlite'}::{tmp_path / 'image'}",
    }


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """``package(name, code)``: an installed package whose function ``cache`` is an entry point of that name."""
    site = tmp_path / "site-packages"

    def install(name: str, code: str) -> None:
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"{name}.py").write_text(code)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[dmuon_tune.caches]\n{name} = {name}:cache\n")

    monkeypatch.syspath_prepend(site)
    return install


def test_the_first_layer_in_order_wins(
    tmp_path: Path, environ: dict[str, str], key: TuningKey, ok: Ok, package: Callable[[str, str], None]
) -> None:
    packaged = tmp_path / "packaged.sqlite"
    package("dmuon_cache_h200", f"def cache():\n    return {str(packaged)!r}\n")
    paths = [
        ("path", tmp_path / "one.sqlite"),
        ("path", tmp_path / "image" / "cache.sqlite"),
        ("user", tmp_path / "home" / ".cache" / "dmuon-tune" / "cache.sqlite"),
        ("site", tmp_path / "site a" / "dmuon-tune" / "cache.sqlite"),
        ("site", tmp_path / "site_b" / "dmuon-tune" / "cache.sqlite"),
        ("package dmuon_cache_h200", packaged),
    ]
    for steps, (_, path) in enumerate(paths):
        ship(path, key, ok(100.0 - steps), steps)
    for steps, (label, path) in enumerate(paths):
        with Layers.open(environ) as layers:
            found = layers.entries(key.problem, key.device)
            assert [(label, entry.config["steps"]) for label, entry in found] == [
                (label, number) for number, (label, _) in enumerate(paths) if number >= steps
            ]
            assert layers.recipe(key.device, GROUP, "float16") == (
                label,
                Recipe(GROUP, "gram", "float16", steps=steps),
            )
            assert layers.recipe(key.device, GROUP, "float32") is None
        path.unlink()
    with Layers.open(environ) as layers:
        assert layers.entries(key.problem, key.device) == []
        assert layers.recipe(key.device, GROUP, "float16") is None


def test_descriptions_say_each_layers_state(
    tmp_path: Path, environ: dict[str, str], key: TuningKey, ok: Ok
) -> None:
    ship(tmp_path / "one.sqlite", key, ok(1.0), 5)
    (tmp_path / "site_b" / "dmuon-tune").mkdir(parents=True)
    (tmp_path / "site_b" / "dmuon-tune" / "cache.sqlite").write_text("no database at all")
    with Layers.open(environ) as layers:
        found = {row["path"]: row for row in layers.descriptions()}
    states = [(row["label"], row["state"], row["entries"]) for row in found.values()]
    assert states[:3] == [("path", "ok", 1), ("path", "unreadable", 0), ("user", "absent", 0)]
    assert "no cache at" in found[str(tmp_path / "image")]["detail"]
    bad = found[str(tmp_path / "site_b" / "dmuon-tune" / "cache.sqlite")]
    assert (bad["label"], bad["state"], bad["entries"]) == ("site", "unreadable", 0)
    assert "not an SQLite file" in bad["detail"] and found[str(tmp_path / "one.sqlite")]["detail"] == ""


def test_a_bad_layer_warns_once_and_stops_nothing(
    tmp_path: Path, environ: dict[str, str], key: TuningKey, ok: Ok, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "one.sqlite").write_text("no database at all")
    ship(tmp_path / "image" / "cache.sqlite", key, ok(1.0), 5)
    for _ in range(2):
        with Layers.open(environ) as layers:
            for _ in range(2):
                assert [label for label, _ in layers.entries(key.problem, key.device)] == ["path"]
                assert layers.recipe(key.device, GROUP, "float16") is not None
    (warning,) = caplog.messages
    assert "\n" not in warning and str(tmp_path / "one.sqlite") in warning


def test_a_layer_that_breaks_after_opening_counts_as_empty(
    tmp_path: Path,
    environ: dict[str, str],
    key: TuningKey,
    ok: Ok,
    caplog: pytest.LogCaptureFixture,
    damage_trials: Callable[[Path], None],
) -> None:
    damage_trials(ship(tmp_path / "one.sqlite", key, ok(1.0), 5))
    ship(tmp_path / "image" / "cache.sqlite", key, ok(1.0), 6)
    with Layers.open(environ) as layers:
        assert [entry.config["steps"] for _, entry in layers.entries(key.problem, key.device)] == [6]
        assert layers.descriptions()[0]["state"] == "unreadable"
    assert len(caplog.messages) == 1


def test_no_package_is_asked_by_who_finds_all_in_this_machines_caches(
    tmp_path: Path, environ: dict[str, str], key: TuningKey, ok: Ok, package: Callable[[str, str], None]
) -> None:
    asked = tmp_path / "asked"
    code = f"from pathlib import Path\ndef cache():\n    Path({str(asked)!r}).touch()\n    return 'none.sqlite'\n"
    package("dmuon_cache_lazy", code)
    ship(user_cache_path(environ), key, ok(1.0), 5)
    with Layers.open(environ) as layers:
        assert layers.recipe(key.device, GROUP, "float16") is not None
        assert next(iter(found for _, found in layers.entries_by_layer(key.problem, key.device) if found))
        assert not layers.is_above("user", "user") and not layers.is_above("user", "path")
        assert layers.is_above("path", "user") and not asked.exists()
        assert layers.is_above("user", "package dmuon_cache_lazy") and not asked.exists()
        assert layers.recipe(key.device, replace(GROUP, batch=9), "float16") is None
    assert asked.exists()


def test_a_package_may_name_the_device_that_its_cache_is_for(
    tmp_path: Path, key: TuningKey, package: Callable[[str, str], None], caplog: pytest.LogCaptureFixture
) -> None:
    limits = tuple(key.device.to_dict().values())
    package(
        "dmuon_cache_for_one",
        f"from dmuon_tune.device import DeviceFingerprint\n"
        f"def cache():\n    return {str(tmp_path / 'packaged.sqlite')!r}, DeviceFingerprint(*{limits!r})\n",
    )
    with Layers.open({"HOME": str(tmp_path)}) as layers:
        for other in (replace(key.device, sm_count=114), replace(key.device, memory_bytes=80 * 2**30)):
            assert layers.entries(key.problem, other) == layers.recipes(other) == []
            assert layers.recipe(other, GROUP, "float16") is None
        assert caplog.messages == [], "there is no such file, and nothing tried to open it"
        assert layers.entries(key.problem, replace(key.device, name="the same silicon")) == []
    assert "dmuon_cache_for_one" in caplog.text and "no cache at" in caplog.text


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("dmuon_cache_raises", "def cache():\n    raise RuntimeError('no\\nluck')\n"),
        ("dmuon_cache_none", "def cache():\n    return None\n"),
        ("dmuon_cache_broken", "import no_such_module_at_all\n"),
    ],
)
def test_a_broken_package_warns_and_stops_nothing(
    tmp_path: Path,
    key: TuningKey,
    package: Callable[[str, str], None],
    caplog: pytest.LogCaptureFixture,
    name: str,
    code: str,
) -> None:
    package(name, code)
    with Layers.open({"HOME": str(tmp_path)}) as layers:
        assert layers.entries(key.problem, key.device) == []
    (warning,) = [message for message in caplog.messages if name in message]
    assert "\n" not in warning


def test_opening_layers_touches_and_creates_nothing(tmp_path: Path, key: TuningKey) -> None:
    environ = {"HOME": str(tmp_path), "XDG_DATA_DIRS": str(tmp_path)}
    with Layers.open(environ) as layers:
        layers.entries(key.problem, key.device)
        layers.descriptions()
    assert os.listdir(tmp_path) == []


def test_the_users_cache_named_twice_is_one_live_layer(tmp_path: Path, key: TuningKey, ok: Ok) -> None:
    environ = {"DMUON_TUNE_CACHE_DIR": str(tmp_path), "DMUON_TUNE_CACHE_PATH": str(tmp_path / "cache.sqlite")}
    ship(tmp_path / "cache.sqlite", key, ok(1.0), 5)
    with Layers.open(environ) as layers:
        assert [label for label, _ in layers.entries(key.problem, key.device)] == ["user"]
        with Store.open_user(environ=environ) as writer:
            writer.record(key, {"steps": 6}, ok(0.5), {})
            assert [entry.config["steps"] for _, entry in layers.entries(key.problem, key.device)] == [6]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"DMUON_TUNE_CACHE_DIR": "/c", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/c/cache.sqlite"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/dmuon-tune/cache.sqlite"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/dmuon-tune/cache.sqlite"),
        ({"DMUON_TUNE_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/dmuon-tune/cache.sqlite"),
        ({"DMUON_TUNE_CACHE_DIR": "here"}, f"{os.getcwd()}/here/cache.sqlite"),
        ({"DMUON_TUNE_CACHE_DIR": "~/here"}, f"{os.path.expanduser('~')}/here/cache.sqlite"),
    ],
)
def test_the_users_path_follows_the_environment(environ: dict[str, str], expected: str) -> None:
    assert user_cache_path(environ) == Path(expected)


def homeless(monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, str]:
    """The environment of a user without HOME and passwd entry, whose temporary folder this is."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    return {"TMPDIR": str(folder)}


def a_link(folder: Path) -> None:
    folder.symlink_to(folder.parent)


def open_to_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def a_file(folder: Path) -> None:
    folder.write_text("")


def of_another_user(folder: Path) -> None:
    folder.mkdir()
    try:
        os.chown(folder, 4242, 4242)
    except PermissionError:
        pytest.skip("only root can make another user's folder")


@pytest.mark.parametrize("take", [a_link, open_to_all, a_file, of_another_user])
def test_no_cache_is_read_from_a_temporary_folder_of_someone_else(
    take: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = homeless(monkeypatch, tmp_path)
    name = f"dmuon-tune-{os.getuid()}"
    assert user_cache_path(environ) == tmp_path / name / "cache.sqlite"
    take(tmp_path / name)
    assert user_cache_path(environ) == tmp_path / f"{name}-2" / "cache.sqlite"
    for _ in range(2):  # the same when it is there
        with Store.open_user(environ=environ) as store:
            assert store.where == str(tmp_path / f"{name}-2" / "cache.sqlite")
    take(tmp_path / f"{name}-3")
    assert user_cache_path(environ) == tmp_path / f"{name}-2" / "cache.sqlite"


def test_the_sites_paths_follow_the_environment() -> None:
    default = ["/opt/dmuon-tune", "/usr/local/share/dmuon-tune", "/usr/share/dmuon-tune"]
    assert [str(path.parent) for path in site_cache_paths({})] == default
    assert [str(path.parent) for path in site_cache_paths({"XDG_DATA_DIRS": "/a::b"})] == [
        "/opt/dmuon-tune",
        "/a/dmuon-tune",
    ]
