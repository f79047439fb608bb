"""Whole chains as jobs: right ones are timed, whatever their form and pieces; wrong and dying ones are results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dmuon_tune import chains
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernel
from dmuon_tune.measure import chain
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measure.executor import Executor
from dmuon_tune.measure.job import ChainJob, Job
from dmuon_tune.measure.timing import Timing, time_warm
from dmuon_tune.measurement import Measurement
from dmuon_tune.recipe import FORMS, Group, Pick, Recipe, first_launch, written
from dmuon_tune.recipe import chain as chain_of

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


def with_ends(recipe: Recipe, momentum: str = "momentum.library", device: DeviceFingerprint = CPU) -> Recipe:
    """The recipe from gradients on, and to a bf16 result by the kernels of its last products where they write one."""
    problems = [first_launch(recipe.group, recipe.dtype)]
    names = {problems[0].op: momentum, **{pick.problem.op: pick.kernel for pick in recipe.picks}}
    for size in set(recipe.pieces):
        group = replace(recipe.group, batch=size)
        problems.append(written(list(chain_of(group, recipe.form, recipe.dtype))[-1]))
    picks = []
    for problem in problems:
        spec = kernel(names[problem.op])
        config = spec.untuned(problem, device)
        if config is not None:
            picks.append(Pick(problem, spec.name, dict(vars(config)), tuning_key(spec, problem, device).sha256))
    return replace(recipe, picks=(*recipe.picks, *picks))


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


@pytest.mark.parametrize("form", FORMS)
def test_a_chain_with_its_ends_goes_from_gradients_to_a_bf16_result(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for chunk in (None, 2):
        bare = by_library(Recipe(Group(5, 12, 20), form, "float32", chunk=chunk))
        bound = chain.BoundChain(with_ends(bare), CPU, "cpu", lambda: None)
        yardstick = chain._yardstick((3, 12, 20), "float32", 5, "cpu")
        bound.load(yardstick.u, torch.full_like(yardstick.x, float("nan")))
        results = [bound().clone() for _ in range(6)]  # momentum goes on, its direction does not change
        assert {result.dtype for result in results} == {torch.bfloat16}
        errors = [chain._polar_error(result, yardstick.polar) for result in results]
        expected = checked(bare, monkeypatch).max_rel_err or 0.0
        assert errors == pytest.approx([expected] * 6, abs=5e-3) and 0 < expected < 0.2
        measurement = checked(with_ends(bare), monkeypatch)
        assert measurement.ok and measurement.max_rel_err == pytest.approx(errors[0], abs=1e-6), measurement.log


def test_another_last_product_writes_every_piece_of_its_own_buffer() -> None:
    def halved(q: torch.Tensor, x: torch.Tensor, y: torch.Tensor, alpha: float) -> None:
        y.copy_(0.5 * alpha * q @ x)

    recipe = by_library(Recipe(Group(5, 12, 20), "gram", "float32", chunk=2))
    x = torch.randn(5, 12, 20) / 16
    out = torch.full((5, 12, 20), float("nan"), dtype=torch.bfloat16)
    results = []
    for ending in (None, chains.Ending({1: halved, 2: halved}, out)):
        bound = chain.BoundChain(recipe, CPU, "cpu", lambda: None)
        bound.load(x, x)
        results.append(chains.run_pieces(
            "gram", bound._launches, recipe.pieces, bound.x, bound.y, bound._buffers, bound._triples, (2,), (), 1.0,
            ending,
        ))
    assert results[1] is out and torch.allclose(results[0], 2 * out.float(), rtol=1e-2, atol=1e-4)


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
        bound.load(x, x)
        results.append(bound().clone())
    assert torch.allclose(*results, atol=1e-5)
    assert not torch.allclose(results[0][0], results[0][1], atol=0.1)


class Wrong:
    """What a wrong chain gives, one after another."""

    def __init__(self, recipe: Recipe, results: list[Any]) -> None:
        self.recipe, self._results = recipe, results

    def load(self, *samples: torch.Tensor) -> None:
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
        spec = kernel(f"{problem.op}.triton" if problem.op in ("apply", "polar_small") else f"{problem.op}.library")
        config = dict(vars(spec.untuned(problem, device)))
        picks.append(Pick(problem, spec.name, config, tuning_key(spec, problem, device).sha256))
    recipe = replace(recipe, picks=tuple(picks))
    whole = with_ends(recipe, "momentum.triton", device)
    assert len(whole.picks) == len(recipe.picks) + 3  # the last product of either piece writes bf16
    with Executor("cuda", workers=1) as executor:
        jobs = [ChainJob(each, "cuda", 1) for each in (recipe, whole)]
        found = [measurement for _, measurement in executor.run(jobs)]
    assert all(measurement.ok for measurement in found), [measurement.log for measurement in found]
    assert all(0 < (measurement.max_rel_err or 0) < 0.2 for measurement in found)
