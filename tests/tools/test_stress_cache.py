"""tools/stress_cache.py, in short: many processes on one cache file, and kills inside its commits, lose nothing."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def stress(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(TOOLS))
    yield importlib.import_module("stress_cache")


def test_sixteen_processes_lose_no_result_and_meet_no_lock(stress: Any, tmp_path: Path) -> None:
    found = stress.writers(tmp_path / "cache.sqlite", processes=16, seconds=1.0)
    assert found["faults"] == [] and found["written"] >= 160 and found["read"] >= 80


def test_kills_inside_commits_lose_nothing_that_was_reported(stress: Any, tmp_path: Path) -> None:
    found = stress.kills(tmp_path / "cache.sqlite", 8)
    assert found["faults"] == [] and found["kept"] >= 8


def test_what_was_lost_is_found(stress: Any, tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    with stress.Store.open(path) as store:
        store.record(stress.KEYS[0], {"block": 1}, stress.result_of(5.0), {})
    assert stress.faults_of(path, {(0, 1): 5.0}) == []
    assert len(stress.faults_of(path, {(0, 1): 4.0})) == 2
    assert len(stress.faults_of(path, {(0, 1): 5.0, (0, 2): 6.0})) == 1
