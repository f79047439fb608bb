"""Worlds of processes that all tests of a session share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .world import Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """``worlds(size).run(case, *arguments)``."""
    known = Worlds()
    yield known
    known.close()
