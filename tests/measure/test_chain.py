"""Whole chains as jobs: right ones are timed, whatever their form and pieces; wrong and dying ones are results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.kernel_specs import kernel
from dmuon_tune.measure import chain
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measure.executor import Executor
from dmuon_tune.measure.job import ChainJob, Job
from dmuon_tune.measure.timing import Timing, time_warm
from dmuon_tune.measurement import Measurement
from dmuon_tune.recipe import FORMS, Group, Pick, Recipe

CPU = fingerprint("cpu")
GROUP = Group(3, 12, 20)


def by_library(recipe: Recipe, **others: str) -> Recipe:
    """The recipe with the library's kernels, but for the ops named in ``others``."""
    picks = []
    for problem in recipe.products():
        spec = kernel(others.get(problem.op, f"{problem.op}.library"))
        config = vars(spec.untuned(problem, CPU))
        picks.append(Pick(problem, spec.name, dict(config), tuning_key(spec, problem, CPU).sha256))
    return replace(recipe, picks=tuple(picks))


def checked(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> Measurement:
    """The chain's measurement in this process, with a made-up time."""
    monkeypatch.setattr(chain, "time_warm", lambda *_: Timing([1.0], 1, 1))
    bound = chain.BoundChain(recipe, CPU, "cpu", lambda: None)
    return chain.check_and_time(bound, ChainJob(recipe, "cpu", 1), {})


@pytest.mark.parametrize("shape", [(5, 12, 20), (4, 20, 12), (2, 1, 1), (1, 16, 16)])
@pytest.mark.parametrize("form", FORMS)
def test_a_right_chain_is_ok_in_any_pieces(
    form: str, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Recipe(Group(*shape), form, "float32")
    found = [checked(by_library(replace(whole, chunk=chunk)), monkeypatch) for chunk in (None, 2, 1)]
    assert all(measurement.ok for measurement in found), [measurement.log for measurement in found]
    errors = [measurement.max_rel_err or 0.0 for measurement in found]
    assert errors == pytest.approx([errors[0]] * 3, rel=1e-3) and 0 < errors[0] < 0.2


def test_the_yardstick_is_the_polar_factor_and_the_plain_forms_distance_to_it() -> None:
    yardstick = chain._yardstick((2, 6, 9), "float32", 5, "cpu")
    u, _, vh = torch.linalg.svd(yardstick.x.double(), full_matrices=False)
    assert torch.allclose(yardstick.polar.double(), u @ vh, atol=1e-5)
    assert 1.1 * 0.01 < yardstick.allowed < 1.1 * 0.2
    tall = chain._yardstick((2, 9, 6), "float32", 5, "cpu")
    u, _, vh = torch.linalg.svd(tall.x.double(), full_matrices=False)
    assert torch.allclose(tall.polar.double(), u @ vh, atol=1e-5)


def test_a_chain_is_launched_piece_by_piece_and_holds_only_its_own_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices that differ, cut or not: the same factors in the same places."""
    x = torch.randn(5, 12, 20) / 16
    results = []
    for chunk in (None, 2):
        recipe = by_library(Recipe(Group(5, 12, 20), "gram", "float32", chunk=chunk))
        bound = chain.BoundChain(recipe, CPU, "cpu", lambda: None)
        bound.load(x)
        results.append(bound().clone())
    assert torch.allclose(*results, atol=1e-5)
    assert not torch.allclose(results[0][0], results[0][1], atol=0.1)


class Wrong:
    """What a wrong chain gives, one after another."""

    def __init__(self, recipe: Recipe, results: list[Any]) -> None:
        self.recipe, self._results = recipe, results

    def load(self, samples: torch.Tensor) -> None:
        pass

    def __call__(self) -> torch.Tensor:
        result: torch.Tensor = self._results.pop(0)
        return result


def test_what_is_wrong_with_a_chain_is_said() -> None:
    recipe = Recipe(GROUP, "gram", "float32")
    polar = chain._yardstick((3, GROUP.rows, GROUP.cols), "float32", 5, "cpu").polar
    missing, swapped, other = polar.clone(), polar[[1, 0, 2]], polar + 1e-4
    missing[1, 2, 3] = float("nan")
    for results, said in (
        ([missing, missing], "not finite or was not written"),
        ([swapped, swapped], "polar error"),
        ([1.3 * polar, 1.3 * polar], "polar error 0.3 > "),
        ([polar, other], "two runs on the same inputs differ"),
    ):
        measurement = chain.check_and_time(Wrong(recipe, results), ChainJob(recipe, "cpu", 1), {})  # type: ignore[arg-type]
        assert measurement.status == "wrong_result" and said in measurement.log


def test_workers_time_chains_and_survive_what_kills_them(test_kernels: None) -> None:
    recipe = Recipe(GROUP, "gram", "float32")
    jobs: list[Job | ChainJob] = [
        ChainJob(by_library(recipe, gram=name), "cpu", seed)
        for seed, name in enumerate(
            ["gram.library", "gram.library.bad_kill", "gram.library.bad_scalar", "gram.library.bad_compile",
             "gram.library.bad_launch", "gram.library.bad_random", "gram.library"]
        )
    ]
    jobs.append(Job("gram.library", by_library(recipe).picks[0].problem, {"entry": "baddbmm"}, "cpu", len(jobs)))
    with Executor("cpu", run_timeout_s=30) as executor:
        found = {job.seed: measurement for job, measurement in executor.run(jobs)}
    assert [found[seed].status for seed in range(len(jobs))] == [
        "ok", "crashed", "ok", "compile_error", "launch_error", "wrong_result", "ok", "ok",
    ]  # a chain's gram runs with alpha 1, which is all that bad_scalar knows
    assert "last words" in found[1].log and "too many resources" in found[4].log
    timed = found[0]
    assert timed.median_us is not None and timed.p20_us is not None and timed.resources["warm"]
    assert timed.resources["compile_s"] >= 0 and 0 < (timed.max_rel_err or 0) < 0.2


def test_a_warm_call_is_timed_without_arguments() -> None:
    calls = []
    timing = time_warm(lambda: calls.append(1), "cpu")
    assert len(calls) > timing.launches and timing.sets == 1 and min(timing.samples_us) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_chains_are_timed_by_graphs_on_a_gpu(form: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = fingerprint("cuda")
    recipe = Recipe(Group(5, 128, 256), form, "float16", chunk=2)
    picks = []
    for problem in recipe.products():
        spec = kernel(f"{problem.op}.library")
        config = dict(vars(spec.untuned(problem, device)))
        picks.append(Pick(problem, spec.name, config, tuning_key(spec, problem, device).sha256))
    recipe = replace(recipe, picks=tuple(picks))
    with Executor("cuda", workers=1) as executor:
        ((_, measurement),) = executor.run([ChainJob(recipe, "cuda", 1)])
    assert measurement.ok, measurement.log
    assert 0 < (measurement.max_rel_err or 0) < 0.2
