"""A sampler that raises, or picks what is not to be had, is named in one line; a run keeps what it measured by then."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmuon_tune.cache import Store
from dmuon_tune.search import samplers as folder
from dmuon_tune.search.record import Record
from dmuon_tune.search.samplers import LegalSpace, Sampler, samplers

from .conftest import Run

pytestmark = pytest.mark.usefixtures("lasting_workers")

PICKS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "raises": (lambda unseen: [][0], "raised in pick: IndexError: list index out of range at "),
    "exits": (lambda unseen: exec("raise SystemExit(3)"), "raised in pick: SystemExit: 3"),
    "too large": (lambda unseen: 10**6, "picked 1000000, which is no row: there are "),
    "negative": (lambda unseen: -1, "picked -1, which is no row: there are "),
    "nan": (lambda unseen: math.nan, "picked nan, which is not an integer"),
    "fraction": (lambda unseen: float(unseen[0]), "which is not an integer"),
    "none": (lambda unseen: None, "picked None, which is not an integer"),
    "truth": (lambda unseen: True, "picked True, which is not an integer"),
    "array": (lambda unseen: unseen, "which is not an integer"),
    "again": (lambda unseen: 0, "picked 0, which was picked before"),  # of a run's seeds, too
}


def sampler(choose: Callable[[Any], Any]) -> type[Sampler]:
    class Faulty(Sampler):
        name, summary = "faulty", ""

        def pick(self, unseen: Any) -> Any:
            return choose(unseen)

    return Faulty


class Unmade(Sampler):
    name, summary = "faulty", ""

    def __init__(self, space: LegalSpace, seed: int, first: Any = ()) -> None:
        raise ValueError("no such space")


class Deaf(Sampler):
    name, summary = "faulty", ""

    def observe(self, row: int, time_us: float | None) -> None:
        raise ValueError("not now")

    def choose(self, unseen: Any) -> int:
        return int(unseen[-1])


KINDS = {
    **{name: (sampler(choose), said) for name, (choose, said) in PICKS.items()},
    "unmade": (Unmade, "raised in making it: ValueError: no such space at "),
    "deaf": (Deaf, "raised in observe: ValueError: not now at "),
}


@pytest.fixture
def record(tmp_path: Path) -> str:
    rows = [[place] for place in range(6)]
    Record("p", "k", "d", {"a": list(range(6))}, rows, [2.0] * 6, []).write(tmp_path / "record.json.gz")
    return str(tmp_path / "record.json.gz")


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_names_it(run: Run, record: str, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    faulty, said = KINDS[kind]
    monkeypatch.setitem(samplers(), "faulty", faulty)
    result = run("replay", "--record", record, "--samplers", "random,faulty")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"dmuon-tune: error: sampler 'faulty' of module {__name__} ") and said in result.err
    assert result.err.endswith("; mend it, or choose another sampler\n") and result.err.count("\n") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_names_it_and_keeps_what_was_measured(
    run: Run, own_cache: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    faulty, said = KINDS[kind]
    monkeypatch.setitem(samplers(), "faulty", faulty)
    how = ("--shapes", "8x24", "--device", "cpu", "--backends", "library", "--trials", "all", "--workers", "1")
    result = run("tune", *how, "--sampler", "faulty")
    assert (result.code, result.out) == (2, "")
    (error,) = [line for line in result.err.splitlines() if "error" in line]
    assert "sampler 'faulty' of module" in error and said in error
    with Store.open(own_cache) as store:
        kept = len(store.all_trials())
    assert kept
    result = run("tune", *how, "--sampler", "random", "--format", "json")
    assert result.code == 0 and result.json["reused"] == kept, result.err


def test_rows_of_numpy_and_a_mask_that_it_writes_to_are_no_fault(
    run: Run, record: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def last(unseen: Any) -> Any:
        row = np.int32(unseen[-1])
        unseen[:] = 0
        return row

    monkeypatch.setitem(samplers(), "faulty", sampler(last))
    assert run("replay", "--record", record, "--samplers", "faulty").code == 0


@pytest.mark.parametrize("code", ["import nothere", "def broken(:", "SAMPLER = 3", "SAMPLER = int", "raise SystemExit"])
def test_a_file_that_is_no_sampler_is_named_and_the_others_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    (tmp_path / "zz_broken.py").write_text(code)
    known = set(samplers())
    monkeypatch.setattr(folder, "__path__", [*folder.__path__, str(tmp_path)])
    with caplog.at_level(logging.WARNING):
        assert set(samplers.__wrapped__()) == known
    (message,) = caplog.messages
    assert message.startswith(f"sampler module {folder.__name__}.zz_broken is left out: ")
