"""What the samplers' models see, how they are fitted, and where the default looks."""

from __future__ import annotations

import itertools

import numpy as np

from dmuon_tune.search.samplers import LegalSpace, sampler_type
from dmuon_tune.search.samplers._features import features
from dmuon_tune.search.samplers.combined import NEAR, TURNS
from dmuon_tune.search.samplers.gp import GpSampler


def whole(*axes: tuple[object, ...]) -> LegalSpace:
    return LegalSpace(axes, np.array(list(itertools.product(*(range(len(axis)) for axis in axes)))))


def test_a_model_sees_logarithms_and_the_powers_of_two_where_they_say_more() -> None:
    def seen(*values: object) -> list[list[float]]:
        return features(whole(values)).T.round(3).tolist()

    assert seen(32, 64, 128) == [[0.0, 0.5, 1.0]]
    assert seen(64, 96, 128, 192, 256) == [[0.0, 0.292, 0.5, 0.792, 1.0], [0.333, 0.0, 0.667, 0.333, 1.0]]
    assert seen(0.5, 1.0, 2.0) == seen(1, 3, 9) == [[0.0, 0.5, 1.0]]
    assert seen(0, 1, 8) == seen("a", "b", "c") == seen(None, 4, 64) == [[0.0, 0.5, 1.0]], "places"
    assert features(whole((False, True), (7,), (2, 4))).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert features(whole((7,))).shape == (1, 0)


def test_the_process_follows_the_slopes_of_its_loss() -> None:
    space, rng = whole(tuple(range(1, 9)), (16, 32, 48), (False, True)), np.random.default_rng(0)
    sampler, rows = GpSampler(space, 0), rng.choice(len(space), 20, replace=False)
    known, values = features(space)[rows], rng.normal(size=20)
    scales = sampler._prior + 0.3 * rng.normal(size=len(sampler._prior))
    _, slopes = sampler._under(scales, known, values)
    for place, slope in enumerate(slopes):
        step = 1e-5 * (np.arange(len(scales)) == place)
        above, below = (sampler._under(scales + sign * step, known, values)[0].loss for sign in (1, -1))
        assert np.isclose((above - below) / 2e-5, slope, rtol=1e-4, atol=1e-6)
    before = sampler._under(sampler._scales, known, values)[0].loss
    assert sampler._fit(known, values).loss < before


def test_as_much_is_expected_as_ruggedness_gains() -> None:
    space, expected, gained = whole(*([tuple(range(1, 7))] * 3)), [], []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        logs, order, sampler = rng.normal(size=len(space)), rng.permutation(len(space)), GpSampler(space, 0)
        known, unseen = order[:40], order[40:]
        for row in known:
            sampler.observe(int(row), float(np.exp(logs[row])))
        for _ in range(10):  # each goes on with the fit
            improvement = sampler._expected(unseen)
        expected.append(improvement.mean())
        gained.append(np.maximum(logs[known].min() - logs[unseen], 0).mean() / logs[known].std())
    assert 0.8 < np.mean(expected) / np.mean(gained) < 1.25


def test_all_but_every_third_pick_are_next_to_one_of_the_fastest() -> None:
    space = whole(*([tuple(range(1, 7))] * 4))
    sampler, is_unseen = sampler_type("combined")(space, 0), np.ones(len(space), dtype=bool)
    times_us = 10 + np.random.default_rng(0).random(len(space))
    for row in range(0, len(space), 80):
        is_unseen[row] = False
        sampler.observe(row, float(times_us[row]))
    for turn in range(4 * TURNS):
        fastest = sorted(sampler.times_us, key=lambda row: times_us[row])[:NEAR]
        row = sampler.pick(np.flatnonzero(is_unseen))
        away = (space.indices[fastest] != space.indices[row]).sum(axis=1).min()
        assert away == 1 or turn % TURNS == 0
        is_unseen[row] = False
        sampler.observe(row, float(times_us[row]))
