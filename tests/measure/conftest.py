"""Makes the kernels of ``tests/measure/kernels`` known to this process and to the workers that it spawns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dmuon_tune import kernel_specs

KERNELS = Path(__file__).parent / "kernels"


@pytest.fixture
def test_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    names = sorted(path.stem for kind in ("bad", "late", "gpu") for path in KERNELS.glob(f"{kind}_*.py"))
    monkeypatch.syspath_prepend(str(KERNELS))
    monkeypatch.setenv(kernel_specs.EXTRA_MODULES_VARIABLE, ",".join(names))
    kernel_specs._modules.cache_clear()
    yield
    kernel_specs._modules.cache_clear()
