"""Runs the command line in this process, with caches of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dmuon_tune.cli import main


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user cache in a fresh folder; nothing of the machine's own caches is read."""
    monkeypatch.setenv("DMUON_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path / "no-site"))
    monkeypatch.setenv("DMUON_TUNE_STARTER", "0")
    monkeypatch.delenv("DMUON_TUNE_CACHE_PATH", raising=False)
    monkeypatch.delenv("DMUON_TUNE_ON_MISS", raising=False)
    return tmp_path / "cache" / "cache.sqlite"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> Result:
        code = main(arguments)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run
