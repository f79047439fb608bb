"""Caches to report on, written through the store, and the command that reports on them."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import ChainKey, Store, TuningKey
from dmuon_tune.cli import main
from dmuon_tune.device import DeviceFingerprint, Toolchain
from dmuon_tune.kernel_specs import kernel
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, Pick, Recipe, chain

H200 = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 62914560, 150_109_880_320)
CUTEDSL = Toolchain("cutedsl", (("nvidia-cutlass-dsl", "4.5.2"),))
GROUP = Group(4, 64, 192)
NASTY = '<script src="http://example.com/x.js">alert(1)</script><img src=x onerror="alert(2)">$x^{2}$ \x07 " \' &'


def ok(median_us: float, **resources: Any) -> Measurement:
    return Measurement.from_samples([median_us * 0.98, median_us, median_us * 1.02], 1e-3, resources)


class Tags(HTMLParser):
    """What a page is made of: ``tags``, (tag, attribute, value) of every attribute, and its visible text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str
    page: str


Report = Callable[..., Result]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user cache in a fresh folder, which is also the current one; nothing of the machine's own is read."""
    monkeypatch.setenv("DMUON_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path / "no-site"))
    monkeypatch.setenv("DMUON_TUNE_STARTER", "0")
    monkeypatch.delenv("DMUON_TUNE_CACHE_PATH", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache" / "cache.sqlite"


@pytest.fixture
def report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Report:
    """Runs ``dmuon-tune report``; ``page`` is the file it wrote, empty where it wrote none."""
    pytest.importorskip("matplotlib", reason="the report draws with matplotlib; pip install 'dmuon-tune[report]'")

    def run(*arguments: str) -> Result:
        code = main(["report", *arguments])
        captured = capsys.readouterr()
        written = tmp_path / "report.html"
        return Result(code, captured.out, captured.err, written.read_text("utf-8") if written.exists() else "")

    return run


@dataclass(frozen=True)
class Filled:
    """A report on what ``fill`` writes, with its images, and what the command printed as JSON."""

    cache: Path
    page: str
    printed: dict[str, Any]
    arguments: tuple[str, ...]


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Filled:
    pytest.importorskip("matplotlib", reason="the report draws with matplotlib; pip install 'dmuon-tune[report]'")
    folder, printed = tmp_path_factory.mktemp("filled"), io.StringIO()
    fill(folder / "cache.sqlite")
    arguments = ("--device", "cpu", "--cache", str(folder / "cache.sqlite"))
    written = ("--out", str(folder / "page.html"), "--png", str(folder / "plots" / "today"), "--format", "json")
    with contextlib.redirect_stdout(printed):
        assert main(["report", *arguments, *written]) == 0
    page = (folder / "page.html").read_text("utf-8")
    return Filled(folder / "cache.sqlite", page, json.loads(printed.getvalue()), arguments)


def fill_one(path: Path) -> None:
    """One result: the library's, on this CPU."""
    problem, device = next(iter(chain(GROUP, "gram", "float32"))), fingerprint("cpu")
    with Store.open(path) as store:
        store.record(tuning_key(kernel(f"{problem.op}.library"), problem, device), {"entry": "addmm"}, ok(20.0), {})


def fill(path: Path) -> None:
    """The products of GROUP on this CPU, the library's current and one stale kernel's, with failures; a timed recipe
    and two of its chains."""
    device = fingerprint("cpu")
    with Store.open(path) as store:
        products = list(chain(GROUP, "gram", "float32"))
        for number, problem in enumerate(products, 1):
            key = tuning_key(kernel(f"{problem.op}.library"), problem, device)
            store.record(key, {"entry": "baddbmm"}, ok(20.0 * number), {"torch": "2.11", "driver": "580.1"})
            other = replace(key, kernel=f"{problem.op}.tilelang", spec_digest="0" * 64)
            store.record(other, {"tile_m": 64}, ok(10.0 * number), {})
            failed = Measurement("compile_error", log=f"Traceback\nValueError: tile {number} too large\nrest")
            store.record(other, {"tile_m": 128}, failed, {})
        picks = tuple(
            Pick(p, f"{p.op}.library", {"entry": "baddbmm"},
                 tuning_key(kernel(f"{p.op}.library"), p, device).sha256)
            for p in products
        )
        recipe = Recipe(GROUP, "gram", "float32", cost_us=400.0, p20_us=390.0, p80_us=410.0, picks=picks,
                        batch_costs=((1, 150.0), (2, 230.0)))
        store.put_recipe(device, recipe)
        store.record_chain(ChainKey(recipe, "code", device), ok(400.0), {})
        wrong = Measurement("wrong_result", max_rel_err=0.5, log="polar error 0.5 > 0.1")
        store.record_chain(ChainKey(replace(recipe, form="plain"), "code", device), wrong, {})


def fill_h200(path: Path) -> None:
    """A symmetric product and its library on another device, with a race, a clock and a disturbed timing."""
    problem = Problem("gemm_symmetric", 1, 2048, 2048, 2048, epilogue="c")
    clock = {"sm_mhz": 1980, "temperature_c": 50, "throttle": ["power cap"]}
    ours = TuningKey(problem, "gemm_symmetric.cutedsl", "1" * 64, H200, CUTEDSL)
    with Store.open(path) as store:
        store.record(ours, {"tile_m": 64}, ok(25.0, clock=clock), {})
        store.record(ours, {"tile_m": 128}, ok(18.0, clock=clock, contended=True), {})
        library = replace(ours, kernel="gemm_symmetric.library", toolchain=Toolchain("library", (("torch", "2.11"),)))
        store.record(library, {"entry": "baddbmm"}, ok(36.0), {})
