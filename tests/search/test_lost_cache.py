"""A cache that is removed, replaced or overwritten while a run tunes into it: the run says that results are lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dmuon_tune.cache import Store
from dmuon_tune.cli import main
from dmuon_tune.errors import CacheError
from dmuon_tune.recipe import Group
from dmuon_tune.search import TuneOptions, tune
from dmuon_tune.search import run as search_run
from dmuon_tune.search.progress import Silent

pytestmark = pytest.mark.usefixtures("lasting_workers")

OPTIONS = TuneOptions(device="cpu", backends=("library",), trials=1)


def truncated(path: Path, other: Path) -> None:
    os.truncate(path, 0)


def cut(path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def text(path: Path, other: Path) -> None:
    path.write_text("not a cache")


def removed(path: Path, other: Path) -> None:
    path.unlink()


def removed_with_its_log(path: Path, other: Path) -> None:
    for each in path.parent.glob(f"{path.name}*"):
        each.unlink()


def folder_removed(path: Path, other: Path) -> None:
    shutil.rmtree(path.parent)


def replaced(path: Path, other: Path) -> None:
    os.replace(other, path)


def overwritten(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())


def overwritten_with_its_log(path: Path, other: Path) -> None:
    overwritten(path, other)
    os.truncate(f"{path}-wal", 0)


def made_anew(path: Path, other: Path) -> None:
    removed_with_its_log(path, other)
    Store.open(path).close()


class After(Silent):
    """Does something to the cache once the first result is in it."""

    def __init__(self, happens: Callable[[], None]) -> None:
        self._left = [happens]

    def measured(self, *arguments: Any) -> None:
        while self._left:
            self._left.pop()()


@pytest.fixture
def places(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A cache's path, and another cache."""
    other = tmp_path / "other.sqlite"
    Store.open(other).close()
    (tmp_path / "own").mkdir()
    yield tmp_path / "own" / "cache.sqlite", other


LOSSES = [folder_removed, made_anew, overwritten_with_its_log, removed, removed_with_its_log, replaced]
DAMAGES = [cut, overwritten, text, truncated]  # the log that is folded back in may mend them


@pytest.mark.parametrize("fault", LOSSES + DAMAGES)
def test_a_run_whose_cache_is_lost_says_so(fault: Callable[[Path, Path], None], places: tuple[Path, Path]) -> None:
    path, _ = places
    error = ""
    with Store.open_user(path) as store:
        try:
            tune([Group(1, 9, 21)], store, OPTIONS, After(lambda: fault(*places)))
        except CacheError as found:
            error = str(found)
    if error:
        assert str(path) in error and "\n" not in error and ";" in error
    else:
        assert fault in DAMAGES
        with Store.open(path, read_only=True) as store:
            assert store.counts()["ok"] == 3


def test_a_run_whose_cache_stays_says_nothing(places: tuple[Path, Path]) -> None:
    with Store.open_user(places[0]) as store:
        assert tune([Group(1, 9, 21)], store, OPTIONS, After(lambda: None)).measured == 3


def test_the_command_ends_with_exit_code_4(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = search_run.Run._keep

    def keep(run: Any, *arguments: Any) -> None:
        kept(run, *arguments)
        removed(*places)
        monkeypatch.setattr(search_run.Run, "_keep", kept)

    monkeypatch.setattr(search_run.Run, "_keep", keep)
    command = ["tune", "--shapes", "1x9x21", "--device", "cpu", "--backends", "library", "--trials", "1"]
    assert main([*command, "--cache", str(places[0])]) == 4
    said = capsys.readouterr()
    assert "measured" not in said.out and f"cache {places[0]} was removed" in said.err.splitlines()[-1]
