"""The proposer gives every sampler's picks as legal configurations, each once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon_tune import space
from dmuon_tune.errors import UsageError
from dmuon_tune.measurement import Measurement
from dmuon_tune.search.proposer import Proposer
from dmuon_tune.search.samplers import sampler_type, samplers

SEEDED = ("combined", "exhaustive")  # those that begin with what is likeliest


def ok(median_us: float) -> Measurement:
    return Measurement.from_samples([median_us], 0.0, {})


def config_type(sizes: list[int]) -> type:
    fields = [(f"axis{place}", int, space.choice(0, range(size))) for place, size in enumerate(sizes)]
    return dataclasses.make_dataclass("Drawn", fields, frozen=True)


@pytest.mark.parametrize("name", sorted(samplers()))
@settings(max_examples=8, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), max_size=4), seed=st.integers(0, 2**64), data=st.data())
def test_every_legal_configuration_once_and_nothing_else(
    name: str, sizes: list[int], seed: int, data: st.DataObject
) -> None:
    drawn = config_type(sizes)
    everything = list(space.enumerate_space(drawn))
    legal = [config for config in everything if data.draw(st.booleans())][:40]
    before = legal[:: data.draw(st.integers(2, 5))]
    proposer = Proposer(drawn, legal, sampler_type(name), seed)
    for config in before:
        proposer.observe(config, ok(1.0))
    proposed: list[Any] = []
    while (config := proposer.propose()) is not None:
        proposed.append(config)
        if len(proposed) % 3:  # the third stays under way
            proposer.observe(config, ok(len(proposed)) if len(proposed) % 2 else Measurement("crashed"))
    assert sorted(map(space.config_json, proposed + before)) == sorted(map(space.config_json, legal))
    assert proposer.unseen == 0


@pytest.mark.parametrize("name", sorted(samplers()))
def test_equal_seeds_and_outcomes_give_equal_picks(name: str) -> None:
    drawn = config_type([5, 4, 3])
    legal = list(space.enumerate_space(drawn))

    def picks(seed: int) -> list[Any]:
        proposer, found = Proposer(drawn, legal, sampler_type(name), seed, lambda: legal[7:9]), []
        for _ in range(30):
            found.append(proposer.propose())
            proposer.observe(found[-1], ok(10.0 + sum(dataclasses.astuple(found[-1]))))
        return found

    assert picks(3) == picks(3) and (picks(3) == picks(4)) == sampler_type(name).is_blind


@pytest.mark.parametrize("name", SEEDED)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_what_is_to_come_first_comes_first_where_it_is_legal_and_new(name: str, data: st.DataObject) -> None:
    drawn = config_type([4, 4])
    everything = list(space.enumerate_space(drawn))
    legal = [config for config in everything if data.draw(st.booleans())]
    first = data.draw(st.lists(st.sampled_from(everything), max_size=8))
    known = [config for config in legal if data.draw(st.booleans())]
    proposer = Proposer(drawn, legal, sampler_type(name), 0, lambda: first)
    for config in known:
        proposer.observe(config, ok(1.0))
    expected = [config for config in dict.fromkeys(first) if config in legal and config not in known]
    assert [proposer.propose() for _ in expected] == expected
    rest = [config for config in legal if config not in known and config not in expected]
    assert (proposer.propose() in rest) is bool(rest)


def test_an_unknown_sampler_is_named_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="unknown sampler 'anneal'; choose among combined, "):
        sampler_type("anneal")
