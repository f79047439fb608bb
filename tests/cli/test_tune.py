"""``tune``, and what ``show``, ``explain``, ``cache list`` and ``doctor`` say of its results."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import CacheEntry, Store
from dmuon_tune.cli import main
from dmuon_tune.cli.tune import _conclude
from dmuon_tune.kernel_specs import kernel
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measure.chain import chain_key
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Recipe
from dmuon_tune.search.options import ProblemReport, TuneReport

from .. import forked
from .conftest import Result, Run

pytestmark = pytest.mark.usefixtures("lasting_workers")

ROOT = Path(__file__).resolve().parents[2]
SHAPE = ("--shapes", "2x8x24", "--device", "cpu")  # the Gram form alone: three products
TUNE = ("tune", *SHAPE, "--trials", "2", "--backends", "library")


def tune(run: Run, *more: str) -> Result:
    return run(*TUNE, *more)


def write(path: Path, entries: list[CacheEntry]) -> None:
    with Store.open(path) as store:
        for entry in entries:
            store.record(entry.key, entry.config, entry.measurement, entry.provenance)


@pytest.fixture(scope="module")
def tuned_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A cache tuned once for all tests, and what ``tune --format json`` printed."""
    path, printed = tmp_path_factory.mktemp("tuned") / "cache.sqlite", io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main([*TUNE, "--cache", str(path), "--format", "json"]) == 0
    return path, json.loads(printed.getvalue())


@pytest.fixture
def tuned(tuned_once: tuple[Path, dict[str, Any]], own_cache: Path) -> dict[str, Any]:
    """What the tuning printed; its cache is this test's user cache."""
    own_cache.parent.mkdir()
    shutil.copy(tuned_once[0], own_cache)
    return tuned_once[1]


def test_winners_have_measured_times_and_a_second_run_tunes_nothing(run: Run, tuned: dict[str, Any]) -> None:
    first = tuned
    assert first["measured"] > 0 and first["complete"] and not first["reused"]
    assert all(problem["winner"]["median_us"] > 0 for problem in first["problems"])
    assert {problem["problem"]["op"] for problem in first["problems"]} == {"gram", "gemm_symmetric", "apply"}
    assert [recipe["group"] for recipe in first["recipes"]] == [{"batch": 2, "rows": 8, "cols": 24}]

    again = tune(run)
    assert again.code == 0
    assert f"has {first['measured']} results" in again.err
    assert "gram 2x8x8x24 float32 row" in again.out and "gram.library" in again.out


def test_show_lists_the_winners_and_recipes(run: Run, tuned: dict[str, Any]) -> None:
    shown = run("show", "--device", "cpu", "--format", "json")
    assert shown.code == 0
    winners = {(row["problem"]["op"], row["problem"]["epilogue"]): row for row in shown.json["winners"]}
    for problem in tuned["problems"]:
        row = winners[problem["problem"]["op"], problem["problem"]["epilogue"]]
        assert (row["median_us"], row["stale"], row["layer"]) == (problem["winner"]["median_us"], None, "user")
    text = run("show", "--device", "cpu").out
    assert "current" in text and "2x8x24" in text


def test_timed_chains_are_shown_as_recipes_and_one_by_one(run: Run, tuned: dict[str, Any]) -> None:
    (recipe,) = tuned["recipes"]
    assert tuned["chains"] == {"timed": 2, "reused": 0, "failed": 0, "unfinished": 0}
    assert recipe["timed"] and recipe["p20_us"] <= recipe["cost_us"] <= recipe["p80_us"]
    assert (recipe["form"], recipe["chunk"], len(recipe["picks"])) == ("gram", None, 3)
    ((batch, cost_us),) = recipe["batch_costs"]
    assert batch == 1 and cost_us > 0

    assert run("show", "--device", "cpu", "--format", "json").json["recipes"] == [{**recipe, "layer": "user"}]
    assert "timed chain" in run("show", "--device", "cpu").out
    chains = run("show", "--device", "cpu", "--chains", "--format", "json").json["chains"]
    assert [chain["recipe"]["group"]["batch"] for chain in chains] == [2, 1]
    assert all(chain["status"] == "ok" and chain["max_rel_err"] > 0 for chain in chains)
    assert chains[0]["median_us"] == recipe["cost_us"]
    table = run("show", "--device", "cpu", "--chains").out.splitlines()
    assert len(table) == 3 and "polar_error" in table[0] and "gram.library entry=" in table[1]

    explained = run("explain", *SHAPE, "--format", "json").json["recipes"]
    assert explained == [{**recipe, "layer": "user"}]
    assert "timed chain" in run("explain", *SHAPE).out


def test_a_recipe_in_pieces_is_shown_with_its_kernels(run: Run, tuned: dict[str, Any], own_cache: Path) -> None:
    (kept,) = tuned["recipes"]
    recipe = Recipe.from_dict(kept)
    device = fingerprint("cpu")
    picks = tuple(
        replace(pick, problem=(alone := replace(pick.problem, batch=1)),
                key=tuning_key(kernel(pick.kernel), alone, device).sha256)
        for pick in recipe.picks
    )
    failed = Measurement("wrong_result", max_rel_err=0.5, log="polar error 0.5 > 0.1, 1.1 of the plain form's")
    with Store.open(own_cache) as store:
        store.put_recipe(device, replace(recipe, chunk=1, picks=picks))
        store.record_chain(chain_key(replace(recipe, chunk=1, picks=picks), device), failed, {})
    assert "2x1" in run("show", "--device", "cpu").out
    found = run("explain", *SHAPE, "--require", "--format", "json")
    assert found.code == 0  # the recipe names kernels of one matrix, which nothing else was tuned for
    assert {(row["origin"], row["layer"], row["problem"].split()[1][:2]) for row in found.json["products"]} == {
        ("tuned", "user", "1x")
    }
    chosen = [row for row in found.json["candidates"] if row["verdict"] == "chosen in the recipe's chain"]
    assert {row["kernel"] for row in chosen} == {pick.kernel for pick in picks}
    failures = run("show", "--device", "cpu", "--failures").out
    assert "gram chain" in failures and "polar error 0.5" in failures
    (shown,) = run("show", "--device", "cpu", "--failures", "--format", "json").json["chains"]
    assert shown["recipe"]["chunk"] == 1 and shown["status"] == "wrong_result"


def test_explain_names_the_choice_its_layer_and_the_gap(run: Run, tuned: dict[str, Any]) -> None:
    found = run("explain", *SHAPE, "--require", "--format", "json")
    assert found.code == 0
    assert {(row["origin"], row["layer"]) for row in found.json["products"]} == {("tuned", "user")}
    verdicts = {(row["kernel"], row["verdict"].partition(":")[0]) for row in found.json["candidates"]}
    assert ("gram.library", "chosen") in verdicts and ("gram.cutedsl", "refused") in verdicts

    missing = run("explain", "--shape", "2x16x32", "--device", "cpu", "--require")
    assert missing.code == 3
    assert "no entry" in missing.out and "library" in missing.out
    assert "dmuon-tune tune --shapes 2x16x32 --dtype float32" in missing.err.splitlines()[-1]


@pytest.mark.parametrize("command", [("explain", "--require"), ("plan", "--world-size", "2")])
def test_the_command_that_is_told_fills_the_gap_where_it_was_found(
    run: Run, command: tuple[str, ...], tmp_path: Path
) -> None:
    place = tmp_path / "my cache's.sqlite"
    write(place, [])
    asked = (*command, "--shapes", "2x8x24", "--device", "cpu", "--cache", str(place))
    first = run(*asked)
    program, *told = shlex.split(first.err.splitlines()[-1].rpartition("run: ")[2])
    assert program == "dmuon-tune" and run(*told, "--trials", "1", "--backends", "library").code == 0
    second = run(*asked)
    assert second.code == 0 and first.code == (3 if command[0] == "explain" else 0)
    assert "run: dmuon-tune" not in second.err


@pytest.mark.parametrize("what", ["digest", "toolchain", "device"])
def test_explain_names_the_field_in_which_an_entry_differs(
    run: Run, tuned: dict[str, Any], own_cache: Path, tmp_path: Path, what: str
) -> None:
    with Store.open(own_cache, read_only=True) as store:
        entries = store.entries()
    changes: dict[str, Any] = {
        "digest": {"spec_digest": "0" * 64},
        "toolchain": {"toolchain": replace(entries[0].key.toolchain, versions=(("torch", "1.0"),))},
        "device": {"device": replace(entries[0].key.device, sm_count=999)},
    }
    other = tmp_path / "other.sqlite"
    write(other, [replace(entry, key=replace(entry.key, **changes[what])) for entry in entries])
    own_cache.unlink()
    found = run("explain", *SHAPE, "--cache", str(other), "--format", "json")
    assert {row["origin"] for row in found.json["products"]} == {"library"}
    said = {
        "digest": "other digest: code 00000000", "toolchain": "other toolchain: torch 1.0",
        "device": "other device: sm_count 999",
    }[what]
    assert any(row["verdict"].startswith(said) and row["layer"] == "path" for row in found.json["candidates"])


@pytest.mark.parametrize(("is_end", "code"), [(False, 1), (True, 0)])
def test_only_what_training_cannot_do_without_fails_a_run(
    capsys: pytest.CaptureFixture[str], is_end: bool, code: int
) -> None:
    problem = Problem("apply", 1, 8, 24, 8, "float16", "bfloat16", epilogue="w")
    failed = ProblemReport(problem, None, None, 2, 0, {"compile_error": 2}, is_end)
    report = TuneReport(fingerprint("cpu"), [failed], [], 2, 0, {}, complete=True)
    assert _conclude(report, "here") == code
    said = capsys.readouterr().err
    assert "no configuration works (compile_error 2)" in said and ("training does without" in said) == is_end


def test_show_failures_gives_the_reason_and_the_log(run: Run, tuned: dict[str, Any], own_cache: Path) -> None:
    log = "Traceback (most recent call last):\n  File x\nValueError: tile too large\nsource of the kernel"
    with Store.open(own_cache) as store:
        entry = store.entries()[0]
        store.record(entry.key, {"entry": "addmm"}, Measurement("compile_error", log=log), {})
    assert run("show", "--device", "cpu", "--failures").out.splitlines()[1].endswith("ValueError: tile too large")
    (failure,) = run("show", "--device", "cpu", "--failures", "--format", "json").json["failures"]
    assert (failure["status"], failure["log"], failure["config"]) == ("compile_error", log, {"entry": "addmm"})


@pytest.mark.parametrize("was", [True, False])
def test_timings_that_were_disturbed_are_shown_as_such(
    run: Run, tuned: dict[str, Any], own_cache: Path, was: bool
) -> None:
    for rows in ("trials", "chains"):
        with sqlite3.connect(own_cache) as connection:
            place = f"json_{'set' if was else 'remove'}(resources, '$.contended'{', json(true)' if was else ''})"
            connection.execute(f"UPDATE dmuon_{rows} SET resources = {place}")
        connection.close()
    winners, chains = run("show", "--device", "cpu").out, run("show", "--device", "cpu", "--chains").out
    assert winners.count("current, disturbed") == (len(tuned["problems"]) if was else 0)
    assert chains.count("ok, disturbed") == (tuned["chains"]["timed"] if was else 0)


def test_cache_list_counts_by_status(run: Run, tuned: dict[str, Any], own_cache: Path) -> None:
    user = run("cache", "list", "--format", "json").json["caches"][0]
    assert (user["layer"], user["path"]) == ("user", str(own_cache))
    assert user["statuses"] == {"ok": tuned["measured"]}
    assert run("cache", "list", "--cache", str(own_cache)).out.splitlines()[1].startswith("file")
    layers = run("cache", "list", "--layers").out
    assert "absent" in layers and "ok" in layers


def test_dry_run_counts_legal_configurations_and_measures_nothing(run: Run, own_cache: Path) -> None:
    found = tune(run, "--dry-run", "--format", "json").json
    assert {row["kernel"] for row in found["spaces"]} == {"gram.library", "gemm_symmetric.library", "apply.library"}
    assert all(row["legal"] == 1 and row["refusal"] is None for row in found["spaces"])
    assert not own_cache.exists()
    assert [row["planned"] for row in found["problems"]] == [1, 1, 1] and found["estimate_s"] > 0
    every = run("tune", *SHAPE, "--dry-run").out
    assert "gram.cutedsl" in every and "sm_90" in every


def test_owners_batches_take_the_place_of_one_processs(run: Run, own_cache: Path) -> None:
    arguments = ("tune", "--shapes", "5x8x24", "--device", "cpu", "--backends", "library", "--dry-run")
    owned = run(*arguments, "--world-size", "2", "--format", "json")
    assert owned.code == 0 and "2 owners run 2 batches: 3x8x24 2x8x24" in owned.err and not own_cache.exists()
    assert {row["problem"]["batch"] for row in owned.json["problems"]} == {2, 3}
    assert run(*arguments, "--param-dtype", "fp32").code == 0  # of one process's ends, too
    alone = run(*arguments, "--bucket-bytes", "4096")
    assert alone.code == 2 and "--bucket-bytes is of owners' batches; give --world-size, too" in alone.err


def test_a_dry_run_says_what_the_cache_holds_and_what_an_effort_adds(run: Run, tuned: dict[str, Any]) -> None:
    found = tune(run, "--dry-run", "--format", "json").json
    assert all(row["known"] == row["legal"] == 1 and row["planned"] == 0 for row in found["problems"])
    assert {row["label"]: row["best_us"] for row in found["problems"]} == {
        row["label"]: row["winner"]["median_us"] for row in tuned["problems"]
    }
    assert (found["trials"], found["budget_s"], found["estimate_s"]) == (2, None, 0.0)
    quick = run("tune", *SHAPE, "--effort", "quick", "--dry-run", "--format", "json").json
    assert (quick["trials"], quick["budget_s"]) == (8, 70.0)
    said = run("tune", *SHAPE, "--dry-run")
    assert "in_cache" in said.out and " s a configuration" in said.err


def test_a_corrupt_user_cache_is_set_aside_with_one_line(run: Run, own_cache: Path) -> None:
    own_cache.parent.mkdir()
    own_cache.write_bytes(b"not a database " * 500)
    result = tune(run, "--format", "json")
    assert result.code == 0 and result.json["measured"] > 0
    warnings = [line for line in result.err.splitlines() if "warning: " in line and "disturbed" not in line]
    assert len(warnings) == 1 and "set aside" in warnings[0]
    assert len(list(own_cache.parent.glob("*.corrupt-*"))) == 1


def test_a_budget_that_ends_at_once_is_said_as_that(run: Run) -> None:
    result = tune(run, "--budget", "0.001s")
    assert result.code == 0
    assert "the budget ended before anything was measured" in result.err
    assert "no result yet for 3 of 3 problems" in result.err
    assert "nothing to tune" not in result.err and "no configuration works" not in result.err


@pytest.mark.parametrize("reason", ["bfloat16", "missing"])
def test_a_requested_backend_that_serves_no_problem_is_said_with_the_reason(
    run: Run, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    names = ("cutedsl",) if reason == "missing" else ("tilelang", "library")
    dtype = ("--dtype", "bfloat16") if reason == "bfloat16" else ()
    result = run("tune", *SHAPE, "--trials", "1", "--backends", ",".join(names), *dtype)
    (warning,) = [line for line in result.err.splitlines() if "warning: backend" in line]
    assert result.code == 0 and f"backend {names[0]} " in warning and warning.partition(": ")[2]
    assert ("bfloat16" if reason == "bfloat16" else "sm_90") in warning


@pytest.mark.parametrize("content", ["text", "database"])
def test_a_named_file_that_is_no_cache_is_refused_and_left_alone(run: Run, tmp_path: Path, content: str) -> None:
    path = tmp_path / "thesis"
    if content == "text":
        path.write_text("Chapter 1. " * 500)
    else:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE bookmarks (url TEXT)")
    before = path.read_bytes()
    result = tune(run, "--cache", str(path))
    assert (result.code, result.out) == (4, "") and result.err.count("\n") == 1 and str(path) in result.err
    assert os.listdir(tmp_path) == ["thesis"] and path.read_bytes() == before


def test_doctor_says_what_runs_and_what_to_install(run: Run, own_cache: Path) -> None:
    result = run("doctor", "--device", "cpu", "--format", "json")
    assert result.code == 0
    found = result.json
    backends = {backend["name"]: backend for backend in found["backends"]}
    assert backends["library"]["available"] and "torch" in backends["library"]["toolchain"]
    assert not backends["cutedsl"]["available"] and "sm_90" in backends["cutedsl"]["reason"]
    assert found["caches"][0]["path"] == str(own_cache) and found["caches"][0]["writable"]


def test_without_a_compiler_doctor_and_tune_say_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    for command in (("doctor", "--device", "cpu"), ("tune", *SHAPE, "--dry-run")):
        result = run(*command)
        assert result.code == 0
        assert "tilelang" in result.out and "install" in result.out
        assert command[0] == "tune" or "arch" in result.out


@pytest.mark.parametrize(("sent", "said"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_signal_keeps_what_was_measured(sent: signal.Signals, said: str, own_cache: Path, tmp_path: Path) -> None:
    shapes = ",".join(f"2x8x{24 + extra}" for extra in range(6))  # 13 products: far from done when interrupted
    command = [
        sys.executable, "-m", "dmuon_tune", "tune", "--shapes", shapes, "--device", "cpu", "--backends", "library",
        "--format", "json",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    tuning = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    assert tuning.stderr is not None
    first = tuning.stderr.readline()  # written when the first result is in the cache
    workers = Path(f"/proc/{tuning.pid}/task/{tuning.pid}/children").read_text().split()
    assert workers
    for process in (*map(int, workers), tuning.pid):  # a batch system sends it to all
        os.kill(process, sent)
        time.sleep(0.1)
    out, err = tuning.communicate(timeout=60)
    assert first.startswith("tuning 1/"), first + err
    assert (tuning.returncode, out) == (128 + sent, "")
    assert err.splitlines()[-1] == f"dmuon-tune: {said}; what was measured is kept: run the same command to go on"
    with Store.open(own_cache, read_only=True) as store:
        counts = store.counts()
    kept = counts["ok"]
    assert 1 <= kept == sum(counts.values()) < 13
    command += ["--budget", "1s"]  # enough to take up what is kept
    done = forked.run(*command[1:], environ=environment, folder=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["reused"] == kept
