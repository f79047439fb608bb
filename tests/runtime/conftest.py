"""Every runtime test reads caches of its own folder, sees each warning as the first, and shares worlds of ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dmuon_tune.runtime  # noqa: F401  (the package's attribute ``plan`` is the function; the module is in sys.modules)

from .distributed.world import Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """``worlds(size).run(case, *arguments)``."""
    known = Worlds()
    yield known
    known.close()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Small products gain nothing from threads, and on a busy machine they wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def cache_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user cache's path, where no file is yet."""
    monkeypatch.setenv("DMUON_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("DMUON_TUNE_CACHE_PATH", raising=False)
    monkeypatch.delenv("DMUON_TUNE_ON_MISS", raising=False)
    (tmp_path / "cache").mkdir()
    sys.modules["dmuon_tune.runtime.plan"]._warn_once.cache_clear()
    yield tmp_path / "cache" / "cache.sqlite"
