"""The program that writes the cache that the package ships: what it keeps, equal bytes, and tuning."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dmuon_tune import starter
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import Contents, Store, contents_of
from dmuon_tune.errors import UsageError
from dmuon_tune.kernel_specs import kernel
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measurement import Measurement
from dmuon_tune.models import presets
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, Pick, Recipe

TOOLS = Path(__file__).resolve().parents[2] / "tools"
DEVICE = fingerprint("cpu")
SPEC = kernel("gram.library")


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's file, which is not there yet, for this machine's processor."""
    path = tmp_path / "shipped.sqlite"
    monkeypatch.setattr(starter, "h200", lambda: (path, DEVICE))
    return path


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, out: Path) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(TOOLS))
    yield importlib.import_module("starter_cache")


def cache(path: Path, m: int, median_us: float, group: Group) -> str:
    """A problem's winner, a slower and a failed configuration, results of older code and of another device, recipes."""
    problem = Problem("gram", 1, m, m, 64, "float32", "float32")
    key = tuning_key(SPEC, problem, DEVICE)
    failed = Measurement("wrong_result", log="off by a bit")
    elsewhere = replace(DEVICE, memory_bytes=2**30)
    with Store.open(path) as store:
        for entry, us in (("bmm", median_us), ("slower", 2 * median_us)):
            store.record(key, {"entry": entry}, Measurement.from_samples([us], 0.0, {}), {"date": "2026-11-30"})
        store.record(key, {"entry": "failed"}, failed, {})
        for other in (replace(key, spec_digest="ab" * 32), replace(key, device=elsewhere)):
            store.record(other, {"entry": "bmm"}, Measurement.from_samples([1.0], 0.0, {}), {})
        recipe = Recipe(group, "gram", "float32", picks=(Pick(problem, SPEC.name, {"entry": "bmm"}, key.sha256),))
        store.put_recipe(DEVICE, replace(recipe, cost_us=9.0, p20_us=8.0, p80_us=10.0, batch_costs=((1, 3.0),)))
        store.put_recipe(elsewhere, recipe)
        stale = replace(recipe.picks[0], key=replace(key, spec_digest="ab" * 32).sha256)
        store.put_recipe(DEVICE, replace(recipe, group=Group(3, 5, 7), picks=(stale,)))
    return str(path)


def read(path: Path) -> Contents:
    with Store.open(path, read_only=True) as store:
        return contents_of(store)


def test_winners_of_todays_code_and_their_recipes_are_written_as_the_same_bytes(
    tool: Any, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = cache(tmp_path / "a.sqlite", 64, 10.0, Group(12, 768, 768))
    second = cache(tmp_path / "b.sqlite", 96, 20.0, Group(5, 768, 768))
    assert tool.main(["--from", first, second]) == 0
    found, content = read(out), out.read_bytes()
    assert [(each.key.problem.m, each.config["entry"]) for each in found.results] in (
        [(64, "bmm"), (96, "bmm")], [(96, "bmm"), (64, "bmm")],
    )
    recipes = {kept.recipe.group.batch: kept.recipe for kept in found.recipes}
    assert recipes.keys() == {12, 5} and recipes[12].batch_costs == ((1, 3.0),) and found.chains == ()
    assert {kept.device for kept in found.recipes} == {DEVICE}
    said = capsys.readouterr()
    assert "left out: of other code than today's, or of another device" in said.err
    gpt2 = next(line.split() for line in said.out.splitlines() if line.startswith("gpt2"))
    assert gpt2[1:] == ["4", "1", "1", "1"]
    assert tool.main(["--from", first]) == 0 and out.read_bytes() == content, "what is there stays"
    out.unlink()
    assert tool.main(["--from", second, first]) == 0 and out.read_bytes() == content


def test_more_than_a_package_may_ship_is_refused(
    tool: Any, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "LIMIT_BYTES", 1000)
    with pytest.raises(UsageError, match="more than the 1000 that a package may ship"):
        tool.main(["--from", cache(tmp_path / "a.sqlite", 64, 10.0, Group(12, 768, 768))])
    assert not out.exists()


def test_presets_are_tuned_and_written(
    lasting_workers: None, tool: Any, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    smallest = {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1}
    monkeypatch.setitem(presets.CONFIGS, "tiny", {**presets.CONFIGS["tiny"], **smallest})
    command = ["--preset", "tiny", "--cache", str(tmp_path / "work.sqlite"), "--backends", "library", "--trials", "1"]
    assert tool.main([*command, "--dry-run"]) == 0 and not out.exists()
    capsys.readouterr()
    assert tool.main(command) == 0
    tiny = next(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("tiny"))
    assert tiny[1:] == ["1", "1", "1", "0"]
    assert [kept.recipe.group for kept in read(out).recipes] == [Group(6, 16, 16)]
    content = out.read_bytes()
    assert tool.main([*command, "--budget", "nothing"]) == 2 and out.read_bytes() == content
    monkeypatch.setattr(starter, "h200", lambda: (out, starter.H200))
    with pytest.raises(UsageError, match="the file is for NVIDIA H200, here is .*; tune there, or give --from"):
        tool.main(command)
