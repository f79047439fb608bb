"""``dmuon-tune replay``: tables, JSON, plots and records of measured spaces."""

from __future__ import annotations

import importlib.util
import math
import tracemalloc
import warnings
from pathlib import Path

import pytest

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import Store
from dmuon_tune.kernel_specs import kernel
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.search.record import Record
from dmuon_tune.space import config_to_dict

from .conftest import Run

PROBLEMS = [Problem("gram", 1, m, m, 64, "float32", "float32") for m in (64, 96)]
SHORT = ("--least", "2", "--seeds", "3", "--samplers", "exhaustive,random")


@pytest.fixture
def measured(own_cache: Path) -> Path:
    device, spec = fingerprint("cpu"), kernel("gram.tilelang")
    own_cache.parent.mkdir()
    with Store.open(own_cache) as store:
        for problem in PROBLEMS:
            for place, config in enumerate(spec.legal_space(problem, device)):
                outcome = Measurement.from_samples([10.0 + place], 0.0, {})
                store.record(tuning_key(spec, problem, device), config_to_dict(config), outcome, {})
    return own_cache


def test_a_table_of_every_space_and_sampler(run: Run, measured: Path) -> None:
    result = run("replay", *SHORT)
    assert result.code == 0, result.err
    rows = [line.split() for line in result.out.splitlines()]
    assert rows[0] == "problem kernel space sampler evaluations median p10 p90 to_97%".split()
    last = [row for row in rows[1:] if row[-1] != "-"]
    shapes = [problem.label().split()[1] for problem in PROBLEMS]
    expected = {(shape, name) for shape in shapes for name in ("exhaustive", "random")}
    assert {(row[1], row[6]) for row in last} == expected
    assert all(row[8:11] == ["1.000"] * 3 for row in last), "a space measured whole is its optimum"


def test_json_has_whole_curves_that_never_fall(run: Run, measured: Path) -> None:
    result = run("replay", *SHORT, "--problem", PROBLEMS[1].label(), "--evaluations", "4", "--format", "json")
    curves = result.json["curves"]
    assert [curve["problem"] for curve in curves] == [PROBLEMS[1].label()] * 2
    for curve in curves:
        assert [point["evaluations"] for point in curve["curve"]] == [1, 2, 3, 4]
        for name in ("median", "p10", "p90"):
            points = [point[name] for point in curve["curve"]]
            assert points == sorted(points) and 0 < points[0] <= points[-1] <= 1
        assert all(point["p10"] <= point["median"] <= point["p90"] for point in curve["curve"])


def test_an_exported_record_replays_as_its_cache_does(run: Run, measured: Path, tmp_path: Path) -> None:
    label, file = PROBLEMS[0].label(), str(tmp_path / "record.json.gz")
    assert run("replay", "--least", "2", "--export", file).code == 2, "two spaces, one file"
    assert run("replay", "--least", "2", "--problem", label, "--export", file).code == 0
    from_cache = run("replay", *SHORT, "--problem", label, "--format", "json")
    from_file = run("replay", *SHORT, "--record", file, "--format", "json")
    assert from_file.json == from_cache.json


def test_a_plot_or_one_line_about_what_it_needs(run: Run, measured: Path, tmp_path: Path) -> None:
    file = tmp_path / "replay.png"
    result = run("replay", *SHORT, "--plot", str(file))
    if importlib.util.find_spec("matplotlib") is None:
        assert (result.code, result.out) == (2, "")
        assert "pip install 'dmuon-tune[report]'" in result.err and len(result.err.splitlines()) == 1
    else:
        assert result.code == 0 and file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--samplers", "anneal", "--least", "2"), 2, "unknown sampler 'anneal'; choose among combined"),
        (("--kernel", "gram.nothing"), 2, "holds no measured space that --problem and --kernel choose"),
        ((), 2, "measured configurations; measure more of it"),
        (("--record", "nowhere.json.gz"), 2, "cannot read the record nowhere.json.gz"),
        (("--record", "a", "--kernel", "gram.tilelang"), 2, "choose from a cache"),
        (("--cache", "nowhere.sqlite"), 4, "nowhere.sqlite"),
        (("--least", "2", "--problem", "gram 1x64", "--export", "/proc/x"), 2, "cannot write the record /proc/x"),
    ],
)
def test_errors_take_one_line(run: Run, measured: Path, arguments: tuple[str, ...], code: int, said: str) -> None:
    result = run("replay", *arguments)
    assert (result.code, result.out) == (code, "")
    assert said in result.err and len(result.err.splitlines()) == 1


@pytest.mark.parametrize(("name", "word"), [
    ("file/none/x.png", "cannot be written"), ("x.bogus", "must end in one of"), ("file/x.png", "cannot be written"),
    ("folder.png", "cannot be written"),
])
def test_a_plot_that_cannot_be_written_is_refused_first(name: str, word: str, run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    result = run("replay", *SHORT, "--plot", str(tmp_path / name))
    assert (result.code, result.out) == (2, "") and word in result.err


@pytest.mark.parametrize("kind", ["text", "nan", "no time", "no costs"])
def test_a_damaged_record_is_refused_and_one_without_costs_is_replayed(run: Run, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "record.json.gz"
    times_us = {"nan": [math.nan, 2.0], "no time": [None, None]}.get(kind, [1.0, 2.0])
    Record("p", "k", "d", {"a": [1, 2]}, [[0], [1]], times_us, [], [None, None], [1.0, None]).write(path)
    if kind == "text":
        path.write_text("times")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = run("replay", "--record", str(path), "--samplers", "random", "--seeds", "2")
    if kind == "no costs":
        assert (result.code, result.err) == (0, "") and "s_to_97%" not in result.out
    else:
        assert (result.code, result.out) == (2, "")
        assert str(path) in result.err and "write one with" in result.err and result.err.count("\n") == 1


@pytest.mark.parametrize("samplers", ["random", "random,enumeration", "enumeration"])
@pytest.mark.parametrize("option", ["--seeds", "--evaluations", "--workers", "--least"])
def test_a_count_too_large_is_refused_before_anything_is_held(
    run: Run, tmp_path: Path, option: str, samplers: str
) -> None:
    path = tmp_path / "record.json.gz"
    Record("p", "k", "d", {"a": [1, 2]}, [[0], [1]], [1.0, 2.0], []).write(path)
    tracemalloc.start()
    result = run("replay", "--record", str(path), "--samplers", samplers, option, "999999999")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 * 2**20
    if option == "--seeds" and samplers != "enumeration":  # a blind one runs once, and no run is longer than its space
        assert (result.code, result.out) == (2, "") and "lower --seeds or --evaluations" in result.err
        assert result.err.count("\n") == 1
    else:
        assert result.code == 0, result.err
