"""Bad input gets one line on stderr, nothing on stdout, and the documented exit code."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dmuon_tune
from dmuon_tune.cache import Store
from dmuon_tune.cache.layers import _warn_once

from .conftest import Run

ROOT = Path(__file__).resolve().parents[2]
ROOT_FILE = str(ROOT / "README.md")


def spawn(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "required: COMMAND"),
        (("frobnicate",), 2, "invalid choice: 'frobnicate'"),
        (("shapes",), 2, "give one of --preset, --model, --shapes; nothing given"),
        (("shapes", "--preset", "tiny", "--shapes", "8x8"), 2, "--preset and --shapes given"),
        (("shapes", "--preset", "qwen9"), 2, "unknown preset 'qwen9'; choose one of"),
        (("shapes", "--model", "nowhere.json"), 2, "neither a file here nor a preset"),
        (("shapes", "--shapes", "0x16"), 2, "0 is not positive"),
        (("shapes", "--shapes=-4x16"), 2, "-4 is not positive"),
        (("shapes", "--shapes", "8x8", "--include", "x"), 2, "--shapes has none"),
        (("shapes", "--preset", "tiny", "--exclude", "*"), 2, "no hidden matrix among"),
        (("tune", "--preset", "tiny", "--dtype", "int8"), 2, "unsupported dtype 'int8'"),
        (("tune", "--preset", "tiny", "--budget", "soon"), 2, "duration 'soon' is not understood"),
        (("tune", "--preset", "tiny", "--budget", "0s"), 2, "out of range"),
        (("tune", "--preset", "tiny", "--budget", "-5s"), 2, "duration '-5s' is out of range: more than 0"),
        (("tune", "--preset", "tiny", "--budget", "-1h30m"), 2, "duration '-1h30m' is out of range"),
        *((("tune", "--preset", "tiny", "--budget", text), 2, f"duration {text!r} is not understood")
          for text in ("30m1h", "1m1m", "\u0663m", "1_0s", "", "-", "m", "1.m")),
        *((("tune", "--preset", "tiny", "--seed", text), 2, f"{text!r} is not an integer")
          for text in ("", "\u0663", "1_0", "1.5", "9" * 19)),
        (("show", "--device", "cpu", "--failures", "--chains"), 2, "not allowed with"),
        (("tune", "--preset", "tiny", "--device", "cpu", "--dry-run", "--cache", ROOT_FILE), 4, "not an SQLite file"),
        (("tune", "--preset", "tiny", "--device", "cpu", "--cache", "/proc/x/y.sqlite"), 4, "let --cache name a file"),
        (("tune", "--preset", "tiny", "--device", "cpu", "--devices", "cpu"), 2, "device and devices both say"),
        (("tune", "--preset", "tiny", "--devices", "cpu,tpu", "--dry-run"), 2, "unknown device 'tpu'"),
        (("replay",), 2, "holds no measured space"),
        (("replay", "--cache", "nowhere.sqlite"), 4, "nowhere.sqlite"),
        (("show", "--device", "cpu", "--cache", "nowhere.sqlite"), 4, "nowhere.sqlite"),
        (("tune", "--preset", "tiny", "--trials", "0"), 2, "'0' is not a positive integer"),
        (("tune", "--preset", "tiny", "--backends", "mojo"), 2, "unknown backend 'mojo'; choose among"),
        (("tune", "--preset", "tiny", "--device", "tpu", "--dry-run"), 2, "unknown device 'tpu'"),
        (("tune", "--preset", "tiny", "--device", "cpu:1", "--dry-run"), 2, "device 'cpu:1' asked"),
        (("plan", "--preset", "tiny", "--world-size", "131073"), 2, "131073 ranks are more than 131072"),
        (("cache",), 2, "required: ACTION"),
        (("cache", "list", "--cache", "nowhere.sqlite"), 4, "nowhere.sqlite"),
    ],
)
def test_one_line_and_the_exit_code(run: Run, arguments: tuple[str, ...], code: int, said: str) -> None:
    result = run(*arguments)
    assert (result.code, result.out) == (code, "")
    assert said in result.err
    assert result.err.splitlines()[-1].startswith("dmuon-tune: error: ")
    assert "Traceback" not in result.err


PLACES = (
    "tune --preset tiny --device cpu --cache", "tune --preset tiny --device cpu --storage", "show --cache",
    "explain --preset tiny --cache", "plan --preset tiny --world-size 2 --cache",
    "plan --preset tiny --world-size 2 --plot",
    "report --cache", "report --out", "report --png", "replay --cache", "replay --record", "replay --export",
    "replay --plot", "cache list --cache", "cache build --cache", "cache prune --losers --cache", "cache export",
    "cache export x.bundle --cache", "cache import", "cache import x.bundle --cache", "cache merge x.bundle --out",
    "cache merge --out x.bundle", "cache diff x.bundle", "cache verify", "cache verify --cache",
)


@pytest.mark.parametrize("command", PLACES)
def test_an_empty_place_is_not_the_default_one(
    run: Run, own_cache: Path, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Store.open_user().close()
    before = own_cache.read_bytes()
    result = run(*command.split(), "")
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1 and "the text is empty; name a place" in result.err
    assert own_cache.read_bytes() == before and os.listdir(tmp_path) == ["cache"]


@pytest.mark.parametrize(
    "command", ["tune --preset tiny --bud 3", "show --all", "cache prune --lose", "replay --lea 3"]
)
def test_an_abbreviated_option_is_unknown(run: Run, command: str) -> None:
    result = run(*command.split())
    assert (result.code, result.out) == (2, "") and "unrecognized arguments: --" in result.err


def test_debug_shows_the_traceback(run: Run) -> None:
    result = run("shapes", "--preset", "qwen9", "--debug")
    assert result.code == 2 and "Traceback" in result.err and "UsageError" in result.err


def test_an_unforeseen_failure_is_one_line_too(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_model.py").write_text("import sys\ndef build():\n    raise KeyboardInterrupt\n")
    result = run("shapes", "--model", "broken_model:build")
    assert (result.code, result.err) == (130, "dmuon-tune: interrupted\n")


def test_corrupt_cache_is_reported_and_left_alone(run: Run, own_cache: Path) -> None:
    own_cache.parent.mkdir()
    own_cache.write_text("this is no database, but long enough to look like one" * 50)
    before = own_cache.read_bytes()
    result = run("cache", "list", "--layers", "--format", "json")
    assert result.code == 4
    assert {row["label"]: row["state"] for row in result.json["layers"]}["user"] == "unreadable"
    assert run("show", "--device", "cpu").code == 4
    assert own_cache.read_bytes() == before


def corrupt(path: Path) -> None:
    path.write_text("this is no database, but long enough to look like one" * 50)


def newer(path: Path) -> None:
    Store.open(path).close()
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE dmuon_meta SET value = '99'")


def locked(path: Path) -> sqlite3.Connection:
    Store.open(path).close()
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    return holder


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("spoil", [corrupt, newer, locked])
def test_an_unreadable_cache_is_said_once_without_advice_to_tune(
    run: Run, own_cache: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], Any], named: bool
) -> None:
    monkeypatch.setenv("DMUON_TUNE_BUSY_TIMEOUT_S", "0.05")
    own_cache.parent.mkdir()
    held = spoil(own_cache)
    more = ("--cache", str(own_cache)) if named else ()
    _warn_once.cache_clear()
    for command in (("show", "--device", "cpu"), ("cache", "list"), ("cache", "list", "--layers")):
        result = run(*command, *more)
        assert result.code == 4
        assert result.err.count("\n") <= 1 and "no cache yet" not in result.err and "nothing is" not in result.err
        if named or command[0] == "show":  # a layer's failure is said once a process
            assert str(own_cache) in result.err
    explained = run("explain", "--shapes", "2x8x24", "--device", "cpu", "--require", *more)
    assert explained.code == 4
    if spoil is corrupt and not named:  # it says what 'cache list --layers' says, and takes no --cache
        doctor = run("doctor", "--device", "cpu", "--format", "json")
        assert doctor.code == 0
        assert {row["label"]: row["state"] for row in doctor.json["caches"]}["user"] == "unreadable"
    if held is not None:
        held.close()


@pytest.mark.parametrize(
    ("policy", "code"), [("zzz", 2), ("error", 3), ("heuristic", 0), ("nearest", 0), ("tune", 0), ("", 0)]
)
def test_explain_obeys_the_policy_for_a_miss(
    run: Run, own_cache: Path, monkeypatch: pytest.MonkeyPatch, policy: str, code: int
) -> None:
    monkeypatch.setenv("DMUON_TUNE_ON_MISS", policy)
    result = run("explain", "--shapes", "2x8x24", "--device", "cpu")
    assert result.code == code
    assert ("DMUON_TUNE_ON_MISS: unknown policy 'zzz'" in result.err) == (code == 2)
    assert ("no tuned entry for 3 products; run: dmuon-tune tune --shapes 2x8x24" in result.err) == (code == 3)
    assert not own_cache.exists()


INTERRUPTED = """
import sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
from dmuon_tune.cli import main
sys.exit(main(["--help"]))
"""


@pytest.mark.parametrize("importing", ["dmuon_tune.cli.program", "dmuon_tune.cli.parser", "argparse"])
def test_an_interrupt_while_the_program_is_imported_is_one_line(importing: str) -> None:
    done = spawn("-c", INTERRUPTED, importing)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "dmuon-tune: interrupted\n")


def children_s() -> float:
    """Processor time of the processes that ended, seconds: on a busy machine they take longer."""
    times = os.times()
    return times.children_user + times.children_system


def test_help_and_version_import_nothing_heavy() -> None:
    code = (
        "import sys; from dmuon_tune.cli import main; assert main(sys.argv[1:]) == 0; "
        "heavy = {'torch', 'sqlalchemy', 'optuna', 'tilelang', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    )
    began_s = children_s()
    for arguments in (["--help"], ["tune", "--help"], ["shapes", "--preset", "tiny"]):
        done = spawn("-c", code, *arguments)
        assert done.returncode == 0, done.stderr
    assert children_s() - began_s < 15


def test_version_of_the_module_run() -> None:
    done = spawn("-m", "dmuon_tune", "--version")
    assert (done.returncode, done.stdout) == (0, f"dmuon-tune {dmuon_tune.__version__}\n")


def test_a_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "dmuon_tune", "shapes", "--preset", "gpt2", "--format", "json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def in_shell(command: str) -> subprocess.CompletedProcess[str]:
    """``$TUNE`` in the command is the command line; ``>&-`` and the like are the shell's."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TUNE": f"{sys.executable} -m dmuon_tune"}
    return subprocess.run(
        ["sh", "-c", command], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    "command",
    [
        "show --device cpu", "shapes --preset tiny", "doctor --device cpu", "cache list --layers", "--version",
    ],
)
def test_a_closed_stdout_or_stderr_is_no_failure(command: str) -> None:
    closed = in_shell(f"$TUNE {command} >&-")
    assert closed.returncode == 0 and "error" not in closed.stderr
    silent = in_shell(f"$TUNE {command} 2>&-")
    assert silent.returncode == 0 and silent.stdout and "dmuon-tune: " not in silent.stdout


def test_tuning_with_every_stream_closed_writes_nothing_into_the_cache_but_results(own_cache: Path) -> None:
    tune = "$TUNE tune --shapes 2x8x24 --device cpu --backends library --trials 1"
    assert in_shell(f"{tune} <&- >&- 2>&-").returncode == 0
    again = in_shell(f"{tune} --format json 2>&-")
    assert again.returncode == 0 and json.loads(again.stdout)["reused"] > 0


@pytest.mark.parametrize("command", ["shapes --preset tiny", "shapes --preset gpt2 --format json", "--help"])
def test_a_full_stdout_is_one_line_that_says_what_to_do(command: str) -> None:
    done = in_shell(f"$TUNE {command} >/dev/full")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "dmuon-tune: error: cannot write the results: No space left on device; "
        "free some space or send stdout to another place"
    )
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_a_full_stderr_changes_nothing() -> None:
    done = in_shell("$TUNE shapes --preset tiny 2>/dev/full")
    assert done.returncode == 0 and "192" in done.stdout
