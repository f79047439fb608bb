"""Replay: samplers compared on recorded spaces, without a device."""

from __future__ import annotations

import gzip
import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import Store
from dmuon_tune.errors import UsageError
from dmuon_tune.kernel_specs import kernel
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.search.record import Record, records
from dmuon_tune.search.replay import replay, run
from dmuon_tune.search.samplers import LegalSpace, Sampler, samplers
from dmuon_tune.space import config_to_dict


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def synthetic() -> Record:
    make = load("synthetic_space").synthetic
    return make(2048, 8192, 0, 500)


def test_the_default_is_ahead_of_random_and_of_plain_tpe(synthetic: Record) -> None:
    curves = replay([synthetic], ["combined", "random", "tpe"], 100, 5)
    for evaluations in (50, 100):
        mean = {
            name: np.mean([curve.fractions[:, evaluations - 1] for curve in curves if curve.sampler == name])
            for name in ("combined", "random", "tpe")
        }
        assert mean["combined"] > max(mean["random"], mean["tpe"]) + 0.01, (evaluations, mean)


def test_equal_arguments_give_equal_curves_whatever_process_runs_them(
    synthetic: Record, monkeypatch: pytest.MonkeyPatch, every_processor: None
) -> None:
    monkeypatch.setattr("dmuon_tune.search.replay.PROCESS_EVALUATIONS", 20)
    (curve,) = replay([synthetic], ["combined"], 25, 2)
    assert curve.fractions.tolist() == [run(synthetic, "combined", 25, seed)[0] for seed in (0, 1)]


def test_a_known_start_is_climbed_from_in_turn_with_random_picks(synthetic: Record) -> None:
    times_us = [time_us or np.inf for time_us in synthetic.times_us]
    start, indices = int(np.argmin(times_us)), synthetic.legal_space().indices
    near, far = [], []
    for seed in range(5):
        _, rows = run(replace(synthetic, first=[start]), "combined", 4, seed)
        assert rows[0] == start
        for row, found in zip(rows[1:], (near, far, near), strict=True):
            found.append(int((indices[row] != indices[start]).sum()))  # axes away from the fastest
    assert max(near) <= 2 < max(far)


class Watched(Sampler):
    """Picks the last unseen; remembers what it was told."""

    name, summary = "watched", ""
    made: list[Watched] = []

    def __init__(self, space: LegalSpace, seed: int, first: tuple[int, ...] = ()) -> None:
        super().__init__(space, seed, first)
        self.made.append(self)

    def choose(self, unseen: np.ndarray) -> int:
        return int(unseen[-1])


def test_a_run_sees_recorded_configurations_alone_and_their_recorded_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(samplers(), "watched", Watched)
    record = Record("p", "k", "d", {"a": [1, 2, 4], "b": [0, 1]}, [[0, 1], [2, 0], [1, 1]], [8.0, None, 2.0], [1])
    assert run(record, "watched", 3, 0) == ([1.0, 1.0, 1.0], [2, 1, 0])
    (sampler,) = Watched.made
    assert sampler.space.indices.tolist() == record.rows and sampler.first == (1,)
    assert sampler.times_us == {2: 2.0, 1: None, 0: 8.0}
    shuffled = replace(record, times_us=[8.0, 2.0, None])
    assert run(shuffled, "watched", 3, 0) == ([0.0, 1.0, 1.0], [2, 1, 0])


def test_an_enumeration_goes_through_the_grid_and_a_replay_says_how_long_it_takes() -> None:
    axes = {"a": [1, 2, 4], "b": [0, 1]}
    rows, times_us = [[2, 1], [0, 1], [1, 0], [0, 0], [2, 0]], [8.0, 4.0, 16.0, None, 4.1]
    record = Record("p", "k", "d", axes, rows, times_us, [], [4.0, 8.0, 2.0, 6.0, None], [1.0, 1.0, 1.0, None, 1.0])
    (curve,) = replay([record], ["enumeration"], 2, 9, workers=2)
    assert run(record, "enumeration", 5, 0)[1] == [3, 1, 2, 4, 0]
    assert curve.fractions.tolist() == [[0.0, 1.0, 1.0, 1.0, 1.0]], "once, and to the end"
    assert curve.seconds is not None and curve.seconds.tolist() == [[3.0, 8.0, 10.0, 13.0, 16.0]]
    assert (curve.evaluations_to(0.97), curve.seconds_to(0.97)) == (2, 8.0)
    (random,) = replay([replace(record, run_s=[None] * 5)], ["random"], 1, 4)
    assert random.fractions.shape == (4, 1) and random.seconds is random.seconds_to(0.97) is None
    half = replace(curve, fractions=np.array([[0.5, 1.0], [0.5, 0.5], [1.0, 1.0]]), seconds=np.ones((3, 2)))
    assert half.seconds_to(0.97) == 1.0 and replace(half, fractions=half.fractions * 0.9).seconds_to(0.97) is None


def test_a_caches_trials_become_a_record_and_a_file_of_it_the_same(tmp_path: Path) -> None:
    device, problem, spec = fingerprint("cpu"), Problem("gram", 1, 64, 64, 64, "float32", "float32"), kernel(
        "gram.tilelang"
    )
    legal = spec.legal_space(problem, device)
    with Store.open("sqlite://") as store:
        for place, config in enumerate(legal):
            found = Measurement.from_samples([10.0 + place], 0.0, {}) if place else Measurement("crashed")
            store.record(tuning_key(spec, problem, device), config_to_dict(config), found, {})
        library = kernel("gram.library")
        store.record(tuning_key(library, problem, device), {"entry": "baddbmm"}, Measurement("crashed"), {})
        (record,) = records(store, lambda problem, kernel: True)
    assert (record.problem, record.kernel, record.failures) == (problem.label(), "gram.tilelang", 1)
    assert record.times_us == [None, *(10.0 + place for place in range(1, len(legal)))]
    values = [[choices[place] for choices, place in zip(record.axes.values(), row, strict=True)] for row in record.rows]
    assert values == [list(config_to_dict(config).values()) for config in legal]
    assert [legal[row] for row in record.first] == [spec.untuned(problem, device)]
    record.write(tmp_path / "record.json.gz")
    assert Record.read(tmp_path / "record.json.gz") == record


@pytest.mark.parametrize(
    "content", [b"", b"no gzip", gzip.compress(b"[]"), gzip.compress(b'{"format": 99}')],
    ids=["empty", "text", "list", "newer"],  # gzip's output holds the time, and each of xdist's workers has its own
)
def test_what_is_no_record_is_said_to_be_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "record.json.gz"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="record.json.gz is no record of this version"):
        Record.read(path)
    with pytest.raises(UsageError, match="cannot read the record .*nowhere"):
        Record.read(tmp_path / "nowhere")
