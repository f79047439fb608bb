"""Untuned kernels on a GPU that is not here: what is fused, what writes another dtype, and what is compiled when."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dmuon_tune import space
from dmuon_tune.backends import CompiledKernel
from dmuon_tune.cache import Layers
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernel, kernels
from dmuon_tune.measure import untuned
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, Recipe, chain
from dmuon_tune.runtime.ends import resolve_ends
from dmuon_tune.runtime.plan import _bind, _recipe
from dmuon_tune.runtime.resolve import Resolver
from dmuon_tune.search.start import untuned_chain
from dmuon_tune.spec import KernelSpec

H200 = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 50 * 2**20, 140 * 2**30)


class Builds:
    """Stands in for compilation and keeps what was asked, as (kernel, problem)."""

    def __init__(self, broken: str = "") -> None:
        self.asked: list[tuple[str, Problem]] = []
        self._broken = broken

    def __call__(self, spec: KernelSpec, problem: Problem, config: Any, device: DeviceFingerprint) -> CompiledKernel:
        self.asked.append((spec.name, problem))
        if spec.name == self._broken:
            raise RuntimeError("ptxas: error")
        return CompiledKernel(lambda *arguments: arguments)


def resolver(tmp_path: Path, build: Builds) -> Resolver:
    pytest.importorskip("cutlass")
    pytest.importorskip("triton")
    return Resolver(H200, Layers.open({"HOME": str(tmp_path)}), use_nearest=False, build=build)


def bound(
    tmp_path: Path, group: Group, build: Builds, source: str, mode: str, out: str, dtype: str = "float16"
) -> dict[str, Any]:
    """The form, and which end is there."""
    found = resolver(tmp_path, build)
    planned = _bind(found, *_recipe(found, group, dtype, 5, (2,)))
    ends = resolve_ends(planned, found, source, mode, out, updates_weights=mode != "none")
    names = [name for name in ("first", "last", "direct", "weights", "with_identity") if getattr(ends, name)]
    return {"form": planned.recipe.form, "ends": names}


def test_a_large_group_reads_and_writes_its_own_dtype(tmp_path: Path) -> None:
    build = Builds()
    assert bound(tmp_path, Group(1, 2048, 4096), build, "bfloat16", "none", "bfloat16") == {
        "form": "gram", "ends": ["first", "last"]
    }
    written = [(name, problem.out_dtype) for name, problem in build.asked if problem.op == "apply"]
    assert written == [("apply.cutedsl", "float16"), ("apply.cutedsl", "bfloat16")]
    (momentum,) = [(name, problem) for name, problem in build.asked if problem.op == "momentum"]
    assert momentum == (
        "momentum.triton", Problem("momentum", 1, 2048, 4096, 1, "bfloat16", "float16", "row", "none")
    )


def test_muon_updates_weights_in_the_last_product(tmp_path: Path) -> None:
    build = Builds()
    found = bound(tmp_path, Group(4, 4096, 1024), build, "float32", "n", "float32")
    assert "weights" in found["ends"]
    assert ("apply.cutedsl", Problem("apply", 4, 1024, 4096, 1024, "float16", "float32", "col", "w")) in build.asked


A100 = DeviceFingerprint("NVIDIA A100", "sm_80", 108, 166912, 40 * 2**20, 80 * 2**30)


@pytest.mark.parametrize(
    ("device", "dtype", "shape", "form"),
    [
        (H200, "float16", (1024, 1024), "plain"),  # as many FLOPs in either form
        (H200, "float16", (4096, 4096), "gram"),
        (H200, "float16", (2560, 2048), "gram"),
        (H200, "float32", (1280, 1024), "plain"),  # the library serves it, which multiplies in full
        (A100, "float16", (1024, 1280), "plain"),
        (A100, "float16", (1024, 1536), "plain"),
        (A100, "float16", (1024, 1600), "gram"),
    ],
    ids=lambda value: getattr(value, "arch", str(value)),
)
def test_without_a_recipe_the_form_of_fewer_flops_runs(
    tmp_path: Path, device: DeviceFingerprint, dtype: str, shape: tuple[int, int], form: str
) -> None:
    pytest.importorskip("cutlass")
    found = Resolver(device, Layers.open({"HOME": str(tmp_path)}), use_nearest=False, build=Builds())
    layer, recipe = _recipe(found, Group(2, *shape), dtype, 5, (2,))
    assert (layer, recipe.form, found.missing) == ("", form, [])


@pytest.mark.parametrize("shape", [(64, 128, 128), (1, 1024, 4096), (1, 4096, 4096), (8, 2048, 5464), (3, 100, 300)])
def test_tuning_begins_with_the_chain_that_runs_untuned(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    found = resolver(tmp_path, Builds())
    planned = _bind(found, *_recipe(found, Group(*shape), "float16", 5, (2,)))
    start = untuned_chain(Group(*shape), "float16", kernels(), H200)
    assert start is not None and start.form == planned.recipe.form
    picked = {pick.problem: (pick.kernel, pick.config) for pick in start.picks}
    for problem, bound in planned.bindings.items():
        assert picked[problem] == (bound.kernel, dict(bound.config))


def test_the_plain_form_updates_weights_by_a_last_product_that_holds_the_identity(tmp_path: Path) -> None:
    build, square = Builds(), Group(1, 1024, 1024)
    found = bound(tmp_path, square, build, "bfloat16", "n", "bfloat16")
    assert found == {"form": "plain", "ends": ["first", "last", "weights", "with_identity"]}
    asked = {(name, problem.epilogue) for name, problem in build.asked if problem.op != "momentum"}
    assert {("gemm_symmetric.cutedsl", "ci"), ("apply.cutedsl", "w")} < asked
    given = bound(tmp_path, square, Builds(), "bfloat16", "none", "bfloat16")
    assert given["ends"] == ["first", "last"]  # a result, no weights


def test_the_library_adds_the_identity_where_it_may_round_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(untuned.FUSED, "polar_small", ())
    low = Group(1, 160, 200)  # below the order from which others make the symmetric products untuned
    found = bound(tmp_path, low, Builds(), "bfloat16", "n", "bfloat16")
    assert found["ends"] == ["first", "last", "weights", "with_identity"]
    found = bound(tmp_path, low, build := Builds(), "bfloat16", "n", "bfloat16", "bfloat16")
    assert found["ends"] == ["first", "last"] and all(problem.epilogue != "w" for _, problem in build.asked)


def test_small_matrices_take_one_launch_compiled_for_their_dtype_alone(tmp_path: Path) -> None:
    build = Builds()
    assert bound(tmp_path, Group(64, 128, 128), build, "bfloat16", "none", "bfloat16")["form"] == "small"
    dtypes = [(problem.dtype, problem.out_dtype) for _, problem in build.asked if problem.op == "polar_small"]
    assert dtypes == [("bfloat16", "bfloat16")]


def test_a_whole_recurrence_is_compiled_at_its_first_launch_or_replaced(tmp_path: Path) -> None:
    (problem,) = chain(Group(64, 128, 128), "small", "float16")
    build = Builds(broken="polar_small.cutedsl")
    found = resolver(tmp_path, build)
    binding = found.bind(problem)
    assert (binding.kernel, binding.origin, build.asked) == ("polar_small.cutedsl", "heuristic", [])
    assert binding.launch(1, 2) == binding.launch(1, 2) == (1, 2)
    assert [name for name, _ in build.asked] == ["polar_small.cutedsl", "polar_small.library"]
    assert "ptxas: error" in found.failures[0]


def test_an_end_that_does_not_compile_is_left_to_torch(tmp_path: Path) -> None:
    build = Builds(broken="momentum.triton")
    found = bound(tmp_path, Group(1, 1024, 4096), build, "bfloat16", "none", "bfloat16")
    assert found["ends"] == ["last"]


def test_an_end_takes_the_kernel_of_the_product_that_it_stands_for(tmp_path: Path) -> None:
    build = Builds()
    found = resolver(tmp_path, build)
    recipe = Recipe(Group(1, 1024, 4096), "gram", "float16")
    problem = next(problem for problem in recipe.products() if problem.op == "apply")
    config = space.config_to_dict(kernel("apply.triton").Config())
    like = replace(found.bind(problem), kernel="apply.triton", config=config)
    binding = found.bind_end(replace(problem, out_dtype="bfloat16"), like)
    assert binding is not None and binding.kernel == "apply.triton"


def test_the_identity_is_added_by_another_kernel_where_the_products_own_cannot(tmp_path: Path) -> None:
    for m, name in ((1024, "gemm_symmetric.cutedsl"), (96, "gemm_symmetric.library")):
        found = resolver(tmp_path, Builds())
        problem = Problem("gemm_symmetric", 1, m, m, m, epilogue="c")
        config = space.config_to_dict(kernel("gemm_symmetric.quack").Config())
        like = replace(found.bind(problem), kernel="gemm_symmetric.quack", config=config)
        binding = found.bind_end(replace(problem, epilogue="ci"), like)
        assert binding is not None and binding.kernel == name and found.missing == [problem]
