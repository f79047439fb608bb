"""The winner rule: fastest, and a fixed order among ties."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dmuon_tune.cache import CacheEntry, TuningKey
from dmuon_tune.device import DeviceFingerprint, Toolchain
from dmuon_tune.measure.winners import Contender, winner
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem

DEVICE = DeviceFingerprint("test", "cpu-x", 1, 0, 1, 0)
PROBLEM = Problem("gram", 1, 8, 8, 8)


def contender(
    kernel: str, median_us: float, untuned: bool = False, smem_bytes: int | None = None, tile: int = 0
) -> Contender:
    key = TuningKey(PROBLEM, kernel, "digest", DEVICE, Toolchain("any", ()))
    resources = {} if smem_bytes is None else {"smem_bytes": smem_bytes}
    measurement = Measurement.from_samples([median_us], 0.0, resources)
    return Contender(CacheEntry(key, {"tile": tile}, measurement, "", {}), untuned)


LIBRARY = contender("gram.library", 10.1)
UNTUNED = contender("gram.tilelang", 10.15, untuned=True, smem_bytes=9000)
SMALL = contender("gram.tilelang", 10.1, smem_bytes=1000, tile=7)
LARGE = contender("gram.tilelang", 10.0, smem_bytes=8000, tile=1)
UNKNOWN = contender("gram.cutedsl", 10.0)


def test_ties_go_to_library_then_untuned_then_less_shared_memory_then_lexical() -> None:
    entrants = [LARGE, UNKNOWN, SMALL, UNTUNED, LIBRARY]
    for expected in (LIBRARY, UNTUNED, SMALL, LARGE, UNKNOWN):
        assert winner(entrants) == expected.entry
        entrants.remove(expected)
    assert winner([]) is None
    twin = contender("gram.tilelang", 10.0, smem_bytes=8000, tile=0)
    assert winner([LARGE, twin]) == twin.entry


def test_beyond_two_percent_the_faster_wins() -> None:
    fast = contender("gram.tilelang", 9.8)
    assert winner([contender("gram.library", 10.0), fast]) == fast.entry
    variant = contender("gram.library.other", 9.9)
    assert winner([variant, contender("gram.library", 10.0)]) != variant.entry


@given(st.lists(st.tuples(st.sampled_from(["gram.library", "gram.tilelang"]), st.floats(1, 100), st.booleans())))
def test_the_winner_is_never_slower_than_the_library(drawn: list[tuple[str, float, bool]]) -> None:
    entrants = [contender(kernel, median_us, untuned) for kernel, median_us, untuned in drawn]
    chosen = winner(entrants)
    assert (chosen is None) == (not entrants)
    if chosen is not None:
        median_us = chosen.measurement.median_us or 0
        assert median_us <= 1.02 * min(entrant.median_us for entrant in entrants)
        if chosen.key.kernel != "gram.library":
            assert all(median_us <= entrant.median_us for entrant in entrants if entrant.is_library)


def raced(kernel: str, median_us: float, place: int, tile: int = 0) -> Contender:
    found = contender(kernel, median_us, tile=tile)
    measurement = replace(found.entry.measurement, resources={"race": {"place": place}})
    return replace(found, entry=replace(found.entry, measurement=measurement))


def test_a_race_decides_across_kernels_until_something_is_far_faster() -> None:
    first, second = raced("gram.tilelang", 10.3, 0), raced("gram.library", 10.0, 1)
    assert winner([second, first]) == first.entry
    assert winner([second, first, contender("gram.cutedsl", 8.8)]) == first.entry, "as of a GPU before its power cap"
    faster = contender("gram.cutedsl", 8.1)
    assert winner([second, first, faster]) == faster.entry
    older = raced("gram.tilelang", 12.0, 0, tile=3)  # of an earlier race that nothing of the later one was in
    assert winner([older, second, first]) == first.entry
