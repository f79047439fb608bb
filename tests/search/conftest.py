"""Kernels that misbehave, known to this process and its workers, and measuring processes that outlast a tuning run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dmuon_tune import kernel_specs

KERNELS = Path(__file__).parents[1] / "measure" / "kernels"


@pytest.fixture
def misbehaving(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(KERNELS))
    monkeypatch.setenv(kernel_specs.EXTRA_MODULES_VARIABLE, "bad_compile,bad_exit,bad_hang,bad_slow,bad_values")
    kernel_specs._modules.cache_clear()
    yield
    kernel_specs._modules.cache_clear()
