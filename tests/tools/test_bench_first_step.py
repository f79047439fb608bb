"""The first step on a shipped cache: processes without DSLs run what was tuned."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dmuon_tune import cli
from dmuon_tune.errors import UsageError

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(TOOLS))
    yield importlib.import_module("bench_first_step")


def test_both_processes_run_what_was_tuned(tool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = tmp_path / "tuned.sqlite"
    of_tune = ("--preset", "tiny", "--device", "cpu", "--backends", "library", "--trials", "1", "--cache", str(cache))
    assert cli.main(["tune", *of_tune]) == 0
    capsys.readouterr()
    assert tool.main(["--preset", "tiny", "--device", "cpu", "--cache", str(cache), "--format", "json"]) == 0
    processes = json.loads(capsys.readouterr().out)["processes"]
    assert len(processes) == 2
    for found in processes:
        assert set(found["origins"]) == {"tuned"} and all(found[column] > 0 for column in tool.COLUMNS)


def test_a_cache_that_is_not_there_is_named(tool: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere.sqlite: there is no such file; make it by 'dmuon-tune tune"):
        tool.main(["--cache", str(tmp_path / "nowhere.sqlite")])
