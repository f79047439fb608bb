"""The cache that the package ships: what the file holds, who gets it, and what goes before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dmuon_tune import starter
from dmuon_tune.backends import CompiledKernel, backends
from dmuon_tune.cache import Contents, Layers, Store, contents_of, database_bytes
from dmuon_tune.kernel_specs import kernel, kernels
from dmuon_tune.measure.build import is_of_todays_code, tuning_key
from dmuon_tune.measurement import Measurement
from dmuon_tune.recipe import Pick, Recipe
from dmuon_tune.runtime.plan import _plan_groups
from dmuon_tune.runtime.resolve import Resolver
from dmuon_tune.space import config_to_dict

LABEL = "package starter-h200"


@pytest.fixture(scope="module")
def shipped() -> Iterator[Contents]:
    path, _ = starter.h200()
    with Store.open(path, read_only=True, shipped=True) as store:
        store.check()
        yield contents_of(store)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), "XDG_DATA_DIRS": str(tmp_path)}


def not_compiled(*ignored: Any) -> CompiledKernel:
    return CompiledKernel(lambda *arguments: None)


def test_it_holds_winners_of_one_device_that_say_where_they_were_measured(shipped: Contents) -> None:
    path, device = starter.h200()
    assert {result.key.device for result in shipped.results} == {device} == {each.device for each in shipped.recipes}
    assert shipped == shipped.only_winners() and shipped.recipes
    for result in shipped.results:
        assert result.measurement.ok and result.measurement.samples and result.imported is None
        assert {"date", "driver", "torch", "tool"} <= result.provenance.keys()
    known = {result.identity[0] for result in shipped.results}
    assert all(pick.key in known for each in shipped.recipes for pick in each.recipe.picks)
    content = path.read_bytes()
    assert len(content) < 5_000_000
    assert content[18:20] == b"\1\1", "no write-ahead log: a read-only folder has no room for its side files"
    assert contents_of_bytes(database_bytes(shipped.as_shipped()), path) == shipped


def contents_of_bytes(content: bytes, like: Path) -> Contents:
    with Store.open("sqlite://") as memory:
        raw = memory._engine.raw_connection()
        raw.driver_connection.deserialize(content)  # type: ignore[union-attr]
        return contents_of(memory)


def test_its_results_are_of_todays_kernels(shipped: Contents) -> None:
    specs = {spec.name: spec for spec in kernels()}
    stale = Counter(
        result.key.kernel for result in shipped.results
        if result.key.kernel not in specs or not is_of_todays_code(result.key, specs[result.key.kernel])
    )
    if stale:
        of = ", ".join(f"{name} ({count})" for name, count in sorted(stale.items()))
        pytest.skip(
            f"{stale.total()} of {len(shipped.results)} shipped results are of older code and serve nobody: {of}; "
            "on an H200 run: python tools/starter_cache.py --cache work.sqlite"
        )


def test_its_device_alone_gets_it_unless_it_is_off(shipped: Contents, environ: dict[str, str]) -> None:
    group, dtype = shipped.recipes[0].recipe.group, shipped.recipes[0].recipe.dtype
    problem = shipped.results[0].key.problem
    renamed = replace(starter.H200, name="the same silicon")
    with Layers.open(environ) as layers:
        assert layers.recipe(renamed, group, dtype) == (LABEL, shipped.recipes[0].recipe)
        assert {label for label, _ in layers.entries(problem, renamed)} == {LABEL}
        for limit in ("sm_count", "smem_per_block_bytes", "l2_bytes", "memory_bytes"):
            other = replace(starter.H200, **{limit: getattr(starter.H200, limit) // 2})
            assert layers.recipe(other, group, dtype) is None
            assert layers.entries(problem, other) == layers.recipes(other) == []
        assert layers.descriptions()[-1]["label"] == LABEL
    with Layers.open({**environ, "DMUON_TUNE_STARTER": "0"}) as layers:
        assert layers.recipe(starter.H200, group, dtype) is None and layers.entries(problem, starter.H200) == []
        assert LABEL not in {layer["label"] for layer in layers.descriptions()}


def serving(shipped: Contents) -> list[Recipe]:
    """The recipes whose products a machine with these versions and such a GPU runs as they say; skips without any."""
    specs = {spec.name: spec for spec in kernels()}

    def serves(pick: Pick) -> bool:
        spec = specs.get(pick.kernel)
        here = spec is not None and backends()[spec.backend].unavailable(starter.H200) is None
        return here and tuning_key(spec, pick.problem, starter.H200).sha256 == pick.key

    recipes = [kept.recipe for kept in shipped.recipes]
    found = [
        recipe for recipe in recipes
        if recipe.products().keys() <= {pick.problem for pick in recipe.picks if serves(pick)}
    ]
    return found or pytest.skip("no recipe of the file is of kernels and versions that are installed here")


def test_training_on_that_device_starts_tuned_and_a_users_own_tuning_goes_before_it(
    shipped: Contents, environ: dict[str, str], ok: Callable[..., Measurement], tmp_path: Path
) -> None:
    recipe = serving(shipped)[0]

    def planned() -> Any:
        with Layers.open(environ) as layers:
            resolver = Resolver(starter.H200, layers, use_nearest=False, build=not_compiled)
            groups = _plan_groups([recipe.group], recipe.dtype, resolver, recipe.steps, recipe.restarts)
            assert resolver.missing == []
            return groups[recipe.group]

    found = planned()
    assert (found.layer, found.recipe) == (LABEL, recipe)
    assert {(bound.origin, bound.layer) for bound in found.bindings.values()} == {("tuned", LABEL)}
    assert not any(tmp_path.iterdir()), "reading writes nothing"
    pick = next(pick for pick in recipe.picks if pick.problem in found.bindings)
    spec = kernel(pick.kernel)
    own = next(
        config for config in spec.legal_space(pick.problem, starter.H200) if config_to_dict(config) != pick.config
    )
    with Store.open_user(environ=environ) as store:
        store.record(tuning_key(spec, pick.problem, starter.H200), config_to_dict(own), ok(1.0), {})
    bound = planned().bindings
    assert (bound[pick.problem].layer, bound[pick.problem].config) == ("user", config_to_dict(own))
    assert {each.layer for problem, each in bound.items() if problem != pick.problem} == {LABEL}
    with Store.open_user(environ=environ) as store:
        store.put_recipe(starter.H200, replace(recipe, form="gram", picks=(), cost_us=1.0))
    assert planned().layer == "user"
