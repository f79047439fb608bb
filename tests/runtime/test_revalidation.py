"""What was measured elsewhere is checked once on this device, which is remembered, and replaced where it is wrong."""

from __future__ import annotations

import logging
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dmuon_tune import kernel_specs
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import Layers, Store, contents_of, gains, keep
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measurement import Measurement
from dmuon_tune.recipe import Group, Pick, Recipe, chain
from dmuon_tune.runtime import Muon, plan

GROUP = Group(1, 16, 64)
GRAM = next(iter(chain(GROUP, "gram", "float32")))
PROVIDER = '''
"""Test kernel: the library's product that counts its launches and may be wrong by a bit of everything."""
from dataclasses import dataclass
import dmuon_tune.kernel_specs.gram_library as library
from dmuon_tune.space import choice
from dmuon_tune.spec import KernelSpec

LAUNCHES = []

@dataclass(frozen=True)
class Config:
    entry: str = choice("right", ("right", "wrong", "raises"))

def build(problem, config, device):
    product = library.build(problem, library.KERNEL.Config("baddbmm"), device)
    def launch(x, r, alpha):
        LAUNCHES.append(config.entry)
        if config.entry == "raises":
            raise RuntimeError("no such instruction")
        product(x, r, alpha * (1.001 if config.entry == "wrong" else 1.0))
    return launch

KERNEL = KernelSpec("gram", "library", Config, library.refusal, build, (__name__,), variant="counted")
'''


@pytest.fixture(autouse=True)
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    (tmp_path / "counted_gram.py").write_text(textwrap.dedent(PROVIDER))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DMUON_TUNE_KERNEL_MODULES", "counted_gram")
    kernel_specs._modules.cache_clear()
    kernel_specs.kernels()
    yield sys.modules["counted_gram"].LAUNCHES
    kernel_specs._modules.cache_clear()
    sys.modules.pop("counted_gram", None)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DMUON_TUNE_CACHE_PATH", str(tmp_path / "shipped.sqlite"))
    return tmp_path / "shipped.sqlite"


def tune(path: Path, entry: str) -> None:
    key = tuning_key(kernel_specs.kernel("gram.library.counted"), GRAM, fingerprint("cpu"))
    with Store.open(path) as store:
        store.record(key, {"entry": entry}, Measurement.from_samples([1.0], 0.0, {}), {})


def row() -> dict[str, Any]:
    return next(row for row in plan([GROUP], "cpu").rows() if row["problem"].startswith("gram"))


def test_a_shipped_entry_is_checked_once(shipped: Path, launches: list[str], cache_file: Path) -> None:
    tune(shipped, "right")
    for _ in range(3):
        chosen = row()
        assert (chosen["origin"], chosen["layer"]) == ("tuned", "path")
        assert launches == ["right", "right"], "two launches are one check"
    assert len(os.listdir(cache_file.parent / "checked")) == 1 and not cache_file.exists()


def test_what_this_machine_measured_is_not_checked_again(launches: list[str], cache_file: Path) -> None:
    tune(cache_file, "right")
    assert (row()["origin"], row()["layer"]) == ("tuned", "user")
    assert launches == [] and os.listdir(cache_file.parent) == ["cache.sqlite"]


def test_an_imported_entry_is_checked_once(launches: list[str], cache_file: Path, tmp_path: Path) -> None:
    tune(tmp_path / "other.sqlite", "right")
    with Store.open(tmp_path / "other.sqlite") as other, Store.open(cache_file) as own:
        keep(own, lambda kept: gains(kept, contents_of(other).as_imported("other")))
    for _ in range(2):
        assert (row()["origin"], row()["layer"]) == ("tuned", "user")
        assert launches == ["right", "right"]


@pytest.mark.parametrize(("entry", "said"), [("wrong", "relative error"), ("raises", "no such instruction")])
def test_a_kernel_that_fails_its_check_never_runs_in_training(
    shipped: Path, launches: list[str], caplog: pytest.LogCaptureFixture, cache_file: Path, entry: str, said: str
) -> None:
    tune(shipped, entry)
    with caplog.at_level(logging.WARNING):
        chosen = row()
    assert (chosen["origin"], chosen["kernel"]) == ("library", "gram.library")
    assert f"gram.library.counted of layer path failed its check for {GRAM.label()}" in caplog.text
    assert said in caplog.text and "the library runs instead" in caplog.text
    checked = len(launches)
    weight = torch.nn.Parameter(torch.randn(16, 64))
    weight.grad = torch.randn(16, 64)
    optimizer = Muon([weight], lr=0.1)
    before = weight.detach().clone()
    optimizer.step()
    assert not torch.equal(weight, before) and torch.isfinite(weight).all()
    assert len(launches) == 2 * checked, "another look-up checks again; the step launches it no more"
    assert not (cache_file.parent / "checked").exists()


def test_a_recipes_pick_of_elsewhere_is_checked(shipped: Path, launches: list[str]) -> None:
    key = tuning_key(kernel_specs.kernel("gram.library.counted"), GRAM, fingerprint("cpu"))
    pick = Pick(GRAM, "gram.library.counted", {"entry": "wrong"}, key.sha256)
    with Store.open(shipped) as store:
        store.put_recipe(fingerprint("cpu"), Recipe(GROUP, "gram", "float32", picks=(pick,)))
    assert (row()["origin"], launches[:1]) == ("library", ["wrong"])


def test_where_nothing_can_be_written_each_process_checks_once(
    shipped: Path, launches: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tune(shipped, "right")
    (tmp_path / "a file").touch()
    monkeypatch.setenv("DMUON_TUNE_CACHE_DIR", str(tmp_path / "a file"))  # no folder can be made in a file
    with Layers.open() as layers:
        for _ in range(2):
            assert plan([GROUP], "cpu", layers=layers).rows()[0]["origin"] == "tuned"
    assert launches == ["right", "right"]
    assert row()["origin"] == "tuned" and len(launches) == 2, "one process remembers"


def test_what_a_package_ships_is_checked_once(
    tmp_path: Path, launches: list[str], monkeypatch: pytest.MonkeyPatch, cache_file: Path
) -> None:
    info = tmp_path / "site" / "dmuon_tuned-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dmuon_tuned\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dmuon_tune.caches]\ntuned = dmuon_tuned:cache\n")
    (info.parent / "dmuon_tuned.py").write_text(f"def cache():\n    return {str(tmp_path / 'tuned.sqlite')!r}\n")
    monkeypatch.syspath_prepend(info.parent)
    tune(tmp_path / "tuned.sqlite", "right")
    for _ in range(2):
        assert (row()["origin"], row()["layer"]) == ("tuned", "package tuned")
    assert launches == ["right", "right"] and len(list((cache_file.parent / "checked").iterdir())) == 1
