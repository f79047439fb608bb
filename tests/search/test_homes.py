"""Several devices: each problem on one of them, all of them busy, real processes behind two."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dmuon_tune.backends import probe
from dmuon_tune.backends.probe import fingerprint, resolve_alike
from dmuon_tune.cache import Store
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.errors import UsageError
from dmuon_tune.measure.executor import Executor
from dmuon_tune.measure.fleet import Fleet
from dmuon_tune.measure.job import AnyJob, Job
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group
from dmuon_tune.search import TuneOptions, tune
from dmuon_tune.search.homes import Homes
from dmuon_tune.search.problem_search import Candidate, ProblemSearch, problem_search
from dmuon_tune.search.schedule import Schedule
from dmuon_tune.space import choice
from dmuon_tune.spec import KernelSpec

OK = Measurement.from_samples([1.0], 0.0, {})


@dataclass(frozen=True)
class Config:
    place: int = choice(0, range(12))


SPEC = KernelSpec("gram", "library", Config, lambda *_: None, lambda *_: None, ("dmuon_tune.space",))


class Device(Executor):
    """Counts what is under way, without processes."""

    def __init__(self, workers: int) -> None:
        super().__init__("cpu", workers)
        self.jobs: list[Candidate] = []

    @property
    def in_flight(self) -> int:
        return len(self.jobs)

    @property
    def has_room(self) -> bool:
        return len(self.jobs) < self.capacity

    def submit(self, job: AnyJob) -> None:
        raise NotImplementedError


def searches(store: Store, trials: Sequence[int]) -> list[ProblemSearch]:
    return [
        problem_search(Problem("gram", 1, m, m, 8, "float32", "float32"), [SPEC], fingerprint("cpu"), store, count, 0)
        for m, count in zip(range(8, 80, 8), trials, strict=False)
    ]


def fill(homes: Homes, schedule: Schedule, devices: Sequence[Device]) -> None:
    busy = [each.search for device in devices for each in device.jobs]
    while (found := homes.next_candidate(schedule, busy)) is not None:
        device, candidate = found
        assert isinstance(device, Device)
        device.jobs.append(candidate)
        busy.append(candidate.search)


def test_each_problem_is_measured_on_one_device_and_both_are_busy() -> None:
    devices = [Device(2), Device(2)]
    homes, places = Homes(Fleet(devices)), defaultdict(set)
    with Store.open("sqlite://") as store:
        schedule, done = Schedule(searches(store, [12] * 4)), []
        while True:
            fill(homes, schedule, devices)
            if not any(device.jobs for device in devices):
                break
            assert len(done) > 40 or all(len(device.jobs) == 2 for device in devices)
            for index, device in enumerate(devices):
                for candidate in [device.jobs.pop(0)] if device.jobs else []:
                    candidate.search.observe(candidate, OK)
                    done.append((candidate.search, candidate.config))
                    places[candidate.search].add(index)
        assert schedule.is_done()
    assert len(done) == len(set(done)) == 48, "every configuration once"
    assert [len(found) for found in places.values()] == [1] * 4
    assert sorted(found.pop() for found in places.values()) == [0, 0, 1, 1]


def test_a_device_that_is_done_takes_over_a_problem_of_which_nothing_is_under_way() -> None:
    first, second = Device(1), Device(1)
    homes = Homes(Fleet([first, second]))
    with Store.open("sqlite://") as store:
        schedule = Schedule(searches(store, [6, 1, 6]))
        fill(homes, schedule, [first, second])
        long, short = first.jobs[0].search, second.jobs[0].search
        second.jobs.pop()
        short.observe(Candidate(short, short.kernels[0], Config(0)), OK)
        fill(homes, schedule, [first, second])
        third = second.jobs[0].search
        assert third not in (long, short), "of new problems the next"
        while second.jobs:  # the first device's one job takes long
            candidate = second.jobs.pop()
            assert candidate.search is third
            third.observe(candidate, OK)
            fill(homes, schedule, [first, second])
        assert third.known == 6 and first.jobs[0].search is long, "what is under way stays where it is"
        candidate = first.jobs.pop()
        long.observe(candidate, OK)
        first.capacity = 0  # busy with something else
        fill(homes, schedule, [second])
        assert [each.search for each in second.jobs] == [long]


def test_processes_of_two_devices_end_in_any_order() -> None:
    """Two executors on one CPU stand for two devices: its lock lets their jobs run one after another."""
    problem = Problem("gram", 1, 8, 8, 8, "float32", "float32")
    fleet = Fleet([Executor("cpu", run_timeout_s=60), Executor("cpu", run_timeout_s=60)])
    try:
        fleet.warm(2)
        assert fleet.capacity == 2
        with pytest.raises(RuntimeError, match="no job"):
            fleet.wait(0.0)
        for seed, executor in enumerate(fleet.with_room()):
            executor.submit(Job("gram.library", problem, {"entry": "baddbmm"}, executor.device, seed))
        assert fleet.with_room() == []
        ended = [fleet.wait() for _ in range(2)]
        assert sorted(job.seed for job, _ in filter(None, ended)) == [0, 1]
        assert all(isinstance(outcome, Measurement) and outcome.ok for _, outcome in filter(None, ended))
        busy = fleet.with_room()[0]
        busy.submit(Job("gram.library", problem, {"entry": "baddbmm"}, busy.device, 2))
        assert [each is busy for each in fleet.with_room()] == [False]
    finally:
        fleet.close()


def test_unlike_devices_are_refused_with_the_field_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 62914560, 150_000_000_000)
    gh200 = DeviceFingerprint("NVIDIA GH200", "sm_90", 132, 232448, 62914560, 100_000_000_000)
    here = {"cuda:0": h200, "cuda:1": h200, "cuda:2": gh200, "cpu": fingerprint("cpu")}
    monkeypatch.setattr(probe, "resolve", lambda name: name)
    monkeypatch.setattr(probe, "fingerprint", here.__getitem__)
    assert resolve_alike(["cuda:1", "cuda", "cuda:0", "cuda:1"]) == ("cuda:1", "cuda:0")
    assert resolve_alike(["cpu"]) == resolve_alike(["cpu", "cpu"]) == ("cpu",)
    said = "devices cuda:0 and cuda:2 are not alike: memory_bytes 150000000000 and 100000000000; tune each kind"
    with pytest.raises(UsageError, match=said):
        resolve_alike(["cuda:0", "cuda:1", "cuda:2"])
    with pytest.raises(UsageError, match="cuda:0 and cpu are not alike: arch sm_90 and cpu-"):
        resolve_alike(["cuda:0", "cpu"])


@pytest.mark.gpu
def test_two_gpus_share_a_run(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    groups = [Group(1, 256, 512), Group(1, 384, 768)]
    options = TuneOptions(devices=("cuda:0", "cuda:1"), backends=("triton",), trials=4, workers=2)
    with Store.open(tmp_path / "cache.sqlite") as store:
        report = tune(groups, store, options)
        assert report.complete and all(problem.winner is not None for problem in report.problems)
        used: dict[Any, set[str]] = defaultdict(set)
        for entry in store.entries():
            used[entry.key.problem].add(entry.provenance["on"])
        assert set.union(*used.values()) == {"cuda:0", "cuda:1"}
        assert len(report.recipes) == 2 and all(recipe.timed for recipe in report.recipes)
        assert tune(groups, store, TuneOptions(device="cuda:1", backends=("triton",), trials=4)).measured == 0
