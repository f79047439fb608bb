"""What ``explain`` lists of a chain's ends on a GPU that is not here."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import pytest

from dmuon_tune.cache import CacheEntry, Layers, Store
from dmuon_tune.cli.explain import _not_compiled, ends_of
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernel
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measurement import Measurement
from dmuon_tune.recipe import Group, Recipe, first_launch
from dmuon_tune.runtime.plan import GroupPlan
from dmuon_tune.runtime.resolve import Resolver

from .conftest import Run

H200 = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 50 * 2**20, 140 * 2**30)


def test_ends_are_listed_with_their_kernels_and_what_pytorch_does(own_cache: Path) -> None:
    pytest.importorskip("cutlass")
    pytest.importorskip("triton")
    recipe = Recipe(Group(3, 1024, 4096), "gram", "float16", chunk=2)
    first, spec = first_launch(recipe.group, "float16"), kernel("momentum.triton")
    entry = CacheEntry(
        tuning_key(spec, first, H200), dict(vars(spec.untuned(first, H200))),
        Measurement.from_samples([7.0], 0.0, {}), "", {},
    )
    with Store.open_user(own_cache) as store:
        store.record(entry.key, entry.config, entry.measurement, {})
    with Layers.open() as layers:
        resolver = Resolver(H200, layers, False, _not_compiled)
        bindings = MappingProxyType({problem: resolver.bind(problem) for problem in recipe.products()})
        rows = dict(ends_of(GroupPlan(recipe, "", bindings), resolver))
    momentum = rows.pop(first)
    names = ("origin", "layer", "median_us", "count")
    assert [momentum[name] for name in names] == ["tuned", "user", 7.0, 1]
    found = {(problem.batch, problem.epilogue, problem.out_dtype): row for problem, row in rows.items()}
    assert found.keys() == {(size, epilogue, "bfloat16") for size in (1, 2) for epilogue in ("none", "w")}
    assert {row["kernel"] for row in found.values()} == {"apply.cutedsl"}
    assert {row["origin"] for row in found.values()} == {"heuristic"}


def test_on_a_cpu_pytorch_does_the_ends(run: Run) -> None:
    assert run("explain", "--shapes", "2x8x24", "--device", "cpu", "--format", "json").json["ends"] == []
