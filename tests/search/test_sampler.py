"""The sampler proposes legal configurations, each once, and learns."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon_tune import space
from dmuon_tune.measurement import Measurement
from dmuon_tune.search.sampler import Sampler


def ok(median_us: float) -> Measurement:
    return Measurement.from_samples([median_us], 0.0, {})


def config_type(sizes: list[int]) -> type:
    fields = [(f"axis{place}", int, space.choice(0, range(size))) for place, size in enumerate(sizes)]
    return dataclasses.make_dataclass("Drawn", fields, frozen=True)


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), max_size=4), seed=st.integers(0, 2**64), data=st.data())
def test_every_legal_configuration_once_and_nothing_else(sizes: list[int], seed: int, data: st.DataObject) -> None:
    drawn = config_type(sizes)
    everything = list(space.enumerate_space(drawn))
    legal = [config for config in everything if data.draw(st.booleans())][:40]
    before = legal[:: data.draw(st.integers(2, 5))]
    remaining = data.draw(st.sampled_from([1, len(legal)]))  # 1: by suggestion; all: exhaustively
    sampler = Sampler(drawn, legal, seed)
    for config in before:
        sampler.observe(config, ok(1.0))
    proposed: list[Any] = []
    while (config := sampler.suggest(remaining)) is not None:
        proposed.append(config)
        if len(proposed) % 3:  # the third stays under way
            sampler.observe(config, ok(len(proposed)) if len(proposed) % 2 else Measurement("crashed"))
    assert sorted(map(space.config_json, proposed + before)) == sorted(map(space.config_json, legal))
    assert sampler.unseen == 0


def test_it_finds_a_good_configuration_sooner_than_chance() -> None:
    drawn = config_type([6, 6, 5, 5])
    optimum = (4, 1, 3, 2)

    def median_us(config: Any) -> float:
        return 10.0 + sum((value - best) ** 2 for value, best in zip(dataclasses.astuple(config), optimum, strict=True))

    legal = [config for config in space.enumerate_space(drawn) if config.axis0 + config.axis1 <= 8]
    found, by_chance = [], []
    for seed in range(5):
        sampler = Sampler(drawn, legal, seed)
        best = float("inf")
        for trial in range(50):
            config = sampler.suggest(50 - trial)
            sampler.observe(config, ok(median_us(config)))
            best = min(best, median_us(config))
        found.append(best)
        by_chance.append(min(map(median_us, random.Random(seed).sample(legal, 50))))
    assert sorted(found)[2] <= 11.0
    assert sum(found) < sum(by_chance)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_is_to_come_first_comes_first_where_it_is_legal_and_new(data: st.DataObject) -> None:
    drawn = config_type([4, 4])
    everything = list(space.enumerate_space(drawn))
    legal = [config for config in everything if data.draw(st.booleans())]
    first = data.draw(st.lists(st.sampled_from(everything), max_size=8))
    known = [config for config in legal if data.draw(st.booleans())]
    sampler = Sampler(drawn, legal, 0, first)
    for config in known:
        sampler.observe(config, ok(1.0))
    expected = [config for config in dict.fromkeys(first) if config in legal and config not in known]
    assert [sampler.suggest(1) for _ in expected] == expected
    rest = [config for config in legal if config not in known and config not in expected]
    assert (sampler.suggest(len(legal)) in rest) is bool(rest)
