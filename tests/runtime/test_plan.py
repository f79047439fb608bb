"""The plan: what a cache written by the real store gives, what a miss does, and that a broken kernel stops nothing."""

from __future__ import annotations

import logging
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from dmuon_tune import kernel_specs
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import Layers, Store
from dmuon_tune.errors import MissingEntryError, UsageError
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, Pick, Recipe, chain
from dmuon_tune.runtime import GramNewtonSchulz, plan

GROUP = Group(1, 16, 64)
PROVIDER = '''
"""Test kernel: the library's product under another name, so that a cache can prefer it."""
from dataclasses import dataclass
import dmuon_tune.kernel_specs.gram_library as library
from dmuon_tune.space import choice
from dmuon_tune.spec import KernelSpec

@dataclass(frozen=True)
class Config:
    entry: str = choice("baddbmm", ("baddbmm", "addmm", "broken"))

def build(problem, config, device):
    if config.entry == "broken":
        raise RuntimeError("no such entry")
    return library.build(problem, config, device)

class Named(KernelSpec):
    name = "gram.second"

KERNEL = Named("gram", "library", Config, library.refusal, build, (__name__,))
'''


def record(path: Path, problem: Problem, kernel: str, config: dict[str, Any], median_us: float) -> None:
    spec = kernel_specs.kernel(kernel)
    with Store.open(path) as store:
        key = tuning_key(spec, problem, fingerprint("cpu"))
        store.record(key, config, Measurement.from_samples([median_us], 1e-6, {}), {"validation": "test"})


def tune_with_library(path: Path, group: Group = GROUP, entry: str = "addmm") -> None:
    for problem in chain(group, "gram", "float32"):
        record(path, problem, f"{problem.op}.library", {"entry": entry}, 10.0)


def test_tuned_entries_are_used_in_silence(cache_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    tune_with_library(cache_file)
    resolved = plan([GROUP], "cpu")
    rows = resolved.rows()
    assert {(row["origin"], row["layer"], row["config"]["entry"]) for row in rows} == {("tuned", "user", "addmm")}
    assert [row["median_us"] for row in rows] == [10.0] * 3
    assert resolved.groups[GROUP].cost_us == 10.0 * sum(chain(GROUP, "gram", "float32").values())
    assert not resolved.missing and not resolved.command and not caplog.records


def test_what_a_process_has_compiled_serves_the_next_plan_too(cache_file: Path) -> None:
    def launches(group: Group) -> dict[Problem, Any]:
        return {problem: bound.launch for problem, bound in plan([group], "cpu").groups[group].bindings.items()}

    before = launches(GROUP)
    assert launches(GROUP) == before and launches(Group(2, 16, 64)) != before
    tune_with_library(cache_file)  # another configuration
    assert not before.items() & launches(GROUP).items()


def test_a_miss_warns_once_with_the_command(cache_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    groups = [GROUP, Group(3, 40, 8)]
    resolved = plan(groups, "cpu", "bfloat16")
    plan(groups, "cpu", "bfloat16")
    assert {row["origin"] for row in resolved.rows()} == {"library"}
    assert len(caplog.records) == 1
    assert "dmuon-tune tune --shapes 1x16x64,3x40x8 --dtype bfloat16" in caplog.text
    assert resolved.command in caplog.text and len(resolved.missing) == 6
    assert not cache_file.exists()


def test_only_the_missing_shapes_are_named(cache_file: Path) -> None:
    tune_with_library(cache_file)
    assert "--shapes 1x32x96 " in plan([GROUP, Group(1, 32, 96)], "cpu").command


def test_error_policy_raises_with_the_command(monkeypatch: pytest.MonkeyPatch, cache_file: Path) -> None:
    monkeypatch.setenv("DMUON_TUNE_ON_MISS", "error")
    with pytest.raises(MissingEntryError, match="dmuon-tune tune --shapes 1x16x64 --dtype float32"):
        plan([GROUP], "cpu")
    tune_with_library(cache_file)
    assert not plan([GROUP], "cpu").missing


def test_nearest_takes_the_closest_shape_of_the_same_code(cache_file: Path) -> None:
    tune_with_library(cache_file, Group(1, 17, 72), "addmm")
    tune_with_library(cache_file, Group(1, 512, 2048), "baddbmm")
    rows = plan([GROUP], "cpu", on_miss="nearest").rows()
    assert {(row["origin"], row["config"]["entry"], row["median_us"]) for row in rows} == {("nearest", "addmm", None)}
    # addmm multiplies no batch: the next nearest legal configuration is taken
    batched = plan([Group(4, 16, 64)], "cpu", on_miss="nearest").rows()
    assert {(row["origin"], row["config"]["entry"]) for row in batched} == {("nearest", "baddbmm")}
    tall = plan([Group(1, 64, 16)], "cpu", on_miss="nearest").rows()
    assert {row["origin"] for row in tall if row["problem"].startswith(("gram", "apply"))} == {"library"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"groups": ["1x16x64"]}, "groups must be a sequence of Group, not ['1x16x64']"),
        ({"groups": 3}, "groups must be a sequence of Group, not 3"),
        ({"steps": 2.5}, "steps must be an integer of at least 1, not 2.5"),
        ({"restarts": 2}, "restarts must be a sequence of integers of at least 1, not 2"),
        ({"layers": "cache.sqlite"}, "layers must be a Layers, not 'cache.sqlite'"),
        ({"device": "cpu:1"}, "device 'cpu:1' asked, but all of this machine's CPUs are one device; use cpu"),
        ({"device": ["cpu"]}, "unknown device ['cpu']; use auto, cpu, cuda or cuda:<index>"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        plan(**{"groups": [GROUP], "device": "cpu", **options})
    assert str(refused.value) == said


def test_policy_and_dtype_are_checked() -> None:
    with pytest.raises(UsageError, match="heuristic, nearest, tune, error"):
        plan([GROUP], "cpu", on_miss="guess")
    with pytest.raises(UsageError, match="float8"):
        plan([GROUP], "cpu", "float8")


def test_the_recipe_of_the_cache_chooses_the_form(cache_file: Path) -> None:
    square = Group(2, 24, 24)
    assert plan([square], "cpu").groups[square].recipe.form == "plain"
    with Store.open(cache_file) as store:
        store.put_recipe(fingerprint("cpu"), Recipe(square, "gram", "float32", cost_us=5.0))
    planned = plan([square], "cpu").groups[square]
    assert (planned.recipe.form, planned.recipe.cost_us, planned.layer) == ("gram", 5.0, "user")


@pytest.fixture
def second_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "second_gram.py").write_text(textwrap.dedent(PROVIDER))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DMUON_TUNE_KERNEL_MODULES", "second_gram")
    kernel_specs._modules.cache_clear()
    yield
    kernel_specs._modules.cache_clear()
    sys.modules.pop("second_gram", None)


def gram_row(cache_file: Path) -> dict[str, Any]:
    return next(row for row in plan([GROUP], "cpu").rows() if row["problem"].startswith("gram"))


@pytest.mark.usefixtures("second_kernel")
def test_the_fastest_wins_and_a_tie_goes_to_the_library(cache_file: Path) -> None:
    problem = next(iter(chain(GROUP, "gram", "float32")))
    record(cache_file, problem, "gram.library", {"entry": "baddbmm"}, 10.0)
    record(cache_file, problem, "gram.second", {"entry": "addmm"}, 9.9)
    assert gram_row(cache_file)["kernel"] == "gram.library"
    record(cache_file, problem, "gram.second", {"entry": "addmm"}, 5.0)
    assert (gram_row(cache_file)["kernel"], gram_row(cache_file)["config"]) == ("gram.second", {"entry": "addmm"})


@pytest.mark.usefixtures("second_kernel")
def test_entries_of_another_code_do_not_count(cache_file: Path, tmp_path: Path) -> None:
    problem = next(iter(chain(GROUP, "gram", "float32")))
    record(cache_file, problem, "gram.second", {"entry": "addmm"}, 5.0)
    assert gram_row(cache_file)["origin"] == "tuned"
    (tmp_path / "second_gram.py").write_text(textwrap.dedent(PROVIDER) + "\nCHANGED = True\n")
    assert gram_row(cache_file)["origin"] == "library"


@pytest.mark.usefixtures("second_kernel")
def test_a_tuned_kernel_that_does_not_compile_is_replaced_loudly(
    cache_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tune_with_library(cache_file)
    problem = next(iter(chain(GROUP, "gram", "float32")))
    record(cache_file, problem, "gram.second", {"entry": "broken"}, 1.0)
    row = gram_row(cache_file)
    assert (row["origin"], row["kernel"]) == ("library", "gram.library")
    assert "gram.second failed to compile" in caplog.text and "no such entry" in caplog.text


def test_a_plan_given_runs_without_looking_up(
    cache_file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune_with_library(cache_file)
    resolved = plan([GROUP], "cpu")
    cache_file.unlink()
    monkeypatch.setattr(Layers, "open", lambda *_: pytest.fail("looked for a cache"))
    x = torch.randn(16, 64)
    run = GramNewtonSchulz(plan=resolved)
    assert torch.equal(run(x), run(x))
    with pytest.raises(UsageError, match="the plan was made for 5 steps"):
        GramNewtonSchulz("jordan", steps=4, plan=resolved)


def test_look_ups_may_share_what_they_open(cache_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, device = [GROUP, Group(1, 16, 32)], torch.device("cpu")
    for group in groups:
        tune_with_library(cache_file, group)
    opened: list[str] = []
    real = Store.open
    monkeypatch.setattr(Store, "open", lambda path, **options: opened.append(str(path)) or real(path, **options))
    newton_schulz = GramNewtonSchulz()
    for shared in (True, False):
        with newton_schulz.looking_up() if shared else nullcontext():
            plans = [newton_schulz.plan_for([group], device) for group in groups]
        assert {row["origin"] for each in plans for row in each.rows()} == {"tuned"}
        assert len(opened) == (1 if shared else 2), opened
        opened.clear()


def test_layers_given_are_asked(cache_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "shipped.sqlite"
    tune_with_library(other)
    with Layers.open({"DMUON_TUNE_CACHE_PATH": str(other), "HOME": str(tmp_path)}) as layers:
        assert {(row["origin"], row["layer"]) for row in plan([GROUP], "cpu", layers=layers).rows()} == {
            ("tuned", "path")
        }


def test_unreadable_cache_does_not_stop_training(cache_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache_file.write_bytes(b"not a database" * 100)
    with caplog.at_level(logging.WARNING):
        assert {row["origin"] for row in plan([GROUP], "cpu").rows()} == {"library"}
    assert "left out" in caplog.text


def picked(cache_file: Path, key: str | None = None) -> dict[str, Any]:
    """The Gram product's row where a recipe of the cache picks its kernel, under ``key`` or today's."""
    problem = next(iter(chain(GROUP, "gram", "float32")))
    today = tuning_key(kernel_specs.kernel("gram.library"), problem, fingerprint("cpu")).sha256
    pick = Pick(problem, "gram.library", {"entry": "addmm"}, key or today)
    with Store.open(cache_file) as store:
        store.put_recipe(fingerprint("cpu"), Recipe(GROUP, "gram", "float32", cost_us=70.0, p20_us=69.0, p80_us=72.0,
                                                    picks=(pick,)))
    assert plan([GROUP], "cpu").groups[GROUP].cost_us == 70.0
    return gram_row(cache_file)


def test_a_recipes_pick_goes_before_the_products_winner(cache_file: Path) -> None:
    tune_with_library(cache_file, entry="baddbmm")
    row = picked(cache_file)
    assert (row["origin"], row["layer"], row["config"]["entry"], row["median_us"]) == ("tuned", "user", "addmm", None)


def test_a_pick_of_another_code_does_not_count(cache_file: Path) -> None:
    tune_with_library(cache_file, entry="baddbmm")
    assert picked(cache_file, "0" * 64)["config"]["entry"] == "baddbmm"


def test_a_chunked_recipe_binds_both_sizes(cache_file: Path) -> None:
    group = Group(5, 16, 64)
    with Store.open(cache_file) as store:
        store.put_recipe(fingerprint("cpu"), Recipe(group, "gram", "float32", chunk=3))
    rows = plan([group], "cpu").rows()
    counts = chain(GROUP, "gram", "float32")
    assert sum(row["count"] for row in rows) == 2 * sum(counts.values())
    assert {row["problem"].split()[1].split("x")[0] for row in rows} == {"3", "2"}


def test_a_small_recipe_without_its_kernel_runs_the_default_form(cache_file: Path) -> None:
    with Store.open(cache_file) as store:
        store.put_recipe(fingerprint("cpu"), Recipe(GROUP, "small", "float16", cost_us=5.0))
    planned = plan([GROUP], "cpu", "float16").groups[GROUP]
    assert (planned.recipe.form, planned.recipe.cost_us, planned.layer) == ("gram", None, "")
