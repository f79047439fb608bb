"""What the benchmarks say of a row of times: figures that were measured, whatever their number and spread."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@settings(deadline=None)  # the first example imports torch
@given(st.lists(st.floats(1e-3, 1e9), min_size=2, max_size=40))
def test_percentiles_lie_between_the_least_and_the_most(samples: list[float]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        from _bench_timing import spread
    found = [spread(samples)[name] for name in ("p20_us", "median_us", "p80_us")]
    ordered = [min(samples), *found, max(samples)]
    assert all(a <= b or math.isclose(a, b) for a, b in zip(ordered, ordered[1:], strict=False)), ordered
