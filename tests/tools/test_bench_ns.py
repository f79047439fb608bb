"""tools/bench_ns.py on a CPU: its table and JSON, methods that fail, its references, inputs and cache filters."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dmuon_tune.coefficients import coefficient_set
from dmuon_tune.recipe import Group

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The program as a module, with caches of its own; one thread, as many wait long for each other on a busy machine.
    """
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.setenv("DMUON_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    import _bench_timing
    import bench_ns

    monkeypatch.setattr(_bench_timing, "WINDOW_US", 500.0)
    monkeypatch.setattr(_bench_timing, "BURN_IN_S", 0.0)
    monkeypatch.setattr(_bench_timing, "CEILING_ORDER", {"cpu": 64})
    monkeypatch.setattr(bench_ns, "resolve", lambda device: "cpu")
    threads, level = torch.get_num_threads(), logging.getLogger("dmuon_tune.runtime").level
    torch.set_num_threads(1)
    yield bench_ns
    torch.set_num_threads(threads)
    logging.getLogger("dmuon_tune.runtime").setLevel(level)  # which the program's methods raise


def run(tools: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench_ns", *arguments])
    status: int = tools.run("bench_ns", tools.main)
    return status


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's run")
def test_one_table_and_all_figures_in_json(
    tools: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    chosen = "tuned,untuned,plain,gram,peer"
    shapes = "2x24x64,96x48"
    status = run(
        tools, monkeypatch, "--shapes", shapes, "--methods", chosen, "--inputs", "gaussian,large", "--json", str(out)
    )
    printed = capsys.readouterr().out
    assert status == 0, printed
    report = json.loads(out.read_text())
    assert report["ceiling_tflops"] > 0 and report["versions"]["torch"] == torch.__version__
    assert [row["shape"] for row in report["rows"]] == ["2x24x64", "1x96x48"]
    for row in report["rows"]:
        methods = row["methods"]
        assert "failed" in methods.pop("peer")  # not installed, or no GPU
        for name, figures in methods.items():
            assert 0 < figures["p20_us"] <= figures["median_us"] <= figures["p80_us"], name
            for kind in ("gaussian", "large"):
                errors = figures["errors"][kind]
                assert errors["recurrence_err"] < 0.005 and errors["recurrence_err"] < errors["polar_err"] < 0.1
        fastest = min(methods["plain"]["median_us"], methods["gram"]["median_us"])
        assert row["summary"]["speedup"] == pytest.approx(fastest / methods["tuned"]["median_us"])
        assert methods["tuned"]["kernels"] and "untuned" in methods["untuned"]["note"]
    speedups = [row["summary"]["speedup"] for row in report["rows"]]
    assert report["geometric_means"]["speedup"] == pytest.approx(math.prod(speedups) ** 0.5)
    for text in ("ours, tuned", "plain NS, BLAS", "gram-newton-schulz", "geometric means", "polar_err / recur_err"):
        assert text in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's run")
def test_a_method_that_fails_says_so_in_its_row_and_the_run_goes_on(
    tools: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = tools.methods

    def with_a_bad_one(library: str) -> Any:
        def bad(*_: Any) -> Any:
            raise MemoryError("no room")

        return real(library) | {"plain": ("plain NS", bad)}

    monkeypatch.setattr(tools, "methods", with_a_bad_one)
    assert run(tools, monkeypatch, "--shapes", "8x16", "--methods", "tuned,plain,gram", "--no-errors") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("plain NS" in line and "MemoryError: no room" in line for line in lines)
    assert any(line.split()[:4] == ["1x8x16", "Gram", "NS,", "BLAS"] and line.split()[-1] == "-" for line in lines)


REASONS = ("still not prepared after 10 s", "its process ended with exit code 7")
STUCK = """
import os, time
try:
    os.mkdir({first!r})
except FileExistsError:  # the other process hangs
    os._exit(7)
time.sleep(3600)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's run")
def test_a_method_that_hangs_or_kills_its_process_fails_alone(
    tools: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another project's package hangs as one of two processes that prepare shapes imports it, and kills the other."""
    (tmp_path / "dion").mkdir()
    (tmp_path / "dion" / "__init__.py").touch()
    (tmp_path / "dion" / "newton_schulz_triton.py").write_text(STUCK.format(first=str(tmp_path / "first")))
    monkeypatch.syspath_prepend(str(tmp_path))  # a spawned process gets the path of this one
    out = tmp_path / "out.json"
    arguments = ("--shapes", "8x16,4x4", "--methods", "dion,plain,peer", "--workers", "2")
    assert run(tools, monkeypatch, *arguments, "--prepare-timeout", "10s", "--json", str(out)) == 0
    printed = capsys.readouterr().out
    found = json.loads(out.read_text())["rows"]
    assert [row["shape"] for row in found] == ["1x8x16", "1x4x4"]
    rows = [row["methods"] for row in found]
    for methods in rows:
        assert "failed" in methods["peer"]  # which is not installed
        assert methods["plain"]["errors"]["gaussian"]["recurrence_err"] < 0.01
    assert {methods["dion"]["failed"] for methods in rows} == set(REASONS), printed
    assert all(methods["plain"]["median_us"] > 0 for methods in rows), printed
    assert [printed.count(reason) for reason in REASONS] == [1, 1]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--methods", "tuned,fastest"), ("--inputs", "ones"), ("--shapes", "8x"), ("--json", "/no/such/folder/a.json"),
        ("--json", "/"), ("--workers", "0"), ("--coefficients", "polar"), ("--dtype", "float64"),
    ],
)
def test_what_is_asked_wrongly_is_refused(
    tools: Any, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    assert run(tools, monkeypatch, *arguments) == 2


def test_flops_of_a_square_chain(tools: Any) -> None:
    assert tools.chain_flops(Group(3, 16, 16)) == 3 * 20 * 16**3
    assert tools.chain_flops(Group(2, 64, 16)) == 2 * (6 * 16**2 * 64 + 14 * 16**3)


@pytest.mark.parametrize("shape", [(2, 6, 20), (2, 20, 6)])
def test_the_polar_reference_is_the_svds(tools: Any, shape: tuple[int, int, int]) -> None:
    u = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 1e-9
    left, _, right = torch.linalg.svd(u, full_matrices=False)
    assert tools.relative(tools.polar(u), left @ right) < 1e-10


def test_the_recurrence_reference_is_scale_invariant_and_the_same_in_both_forms(tools: Any) -> None:
    import _bench_methods

    coefficients = coefficient_set("polar-express-1.02")
    u = torch.randn(2, 12, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    plain = tools.recurrence(u, coefficients)
    assert tools.relative(tools.recurrence(1e-9 * u.mT, coefficients).mT, plain) < 1e-9
    assert tools.relative(_bench_methods.gram_ns(u, coefficients, torch.float64), plain) < 1e-6


def test_inputs_have_the_spectra_they_are_named_for(tools: Any) -> None:
    group, device = Group(2, 40, 32), torch.device("cpu")
    values = {}
    for kind in tools.INPUTS:
        u = tools.make_input(kind, group, device, 0)
        assert u.shape == (2, 40, 32) and u.dtype == torch.float32 and u.is_contiguous()
        values[kind] = torch.linalg.svdvals(u.double())
    first, last = values["cond1e6"][:, 0], values["cond1e6"][:, -1]
    assert torch.allclose(first / last, torch.tensor(1e6, dtype=torch.float64), rtol=0.1)
    assert bool((values["lowrank"][:, 2] < 3e-3).all()) and bool((values["lowrank"][:, 1] > 1).all())
    assert bool((values["spike"][:, 0] > 300 * values["spike"][:, 1]).all())
    assert values["tiny"].max() < 1e-7 < 1e6 < values["large"].max()


def test_other_projects_results_are_left_out_and_no_layers_have_none(tools: Any, tmp_path: Path) -> None:
    import _bench_methods

    from dmuon_tune.backends.probe import fingerprint
    from dmuon_tune.cache import Layers, Store, TuningKey
    from dmuon_tune.device import Toolchain
    from dmuon_tune.measurement import Measurement
    from dmuon_tune.problem import Problem

    device, problem = fingerprint("cpu"), Problem("gram", 1, 8, 8, 8)
    environ = {"DMUON_TUNE_CACHE_DIR": str(tmp_path)}
    with Store.open_user(None, environ) as store:
        for backend in ("quack", "library"):
            key = TuningKey(problem, f"gram.{backend}", "digest", device, Toolchain(backend, (("x", "1"),)))
            store.record(key, {}, Measurement("ok", 1.0, 0.9, 1.1, (1.0,)), {})

    def found(layers: type[Layers]) -> set[str]:
        with layers(environ) as opened:
            return {entry.key.kernel for _, entry in opened.entries(problem, device)}

    assert found(Layers) == {"gram.quack", "gram.library"}
    assert found(_bench_methods.OwnLayers) == {"gram.library"}
    assert found(_bench_methods.NoLayers) == set()
