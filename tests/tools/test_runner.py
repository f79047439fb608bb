"""The programs in tools/: every error is one line that names the program, with the command line's exit code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dmuon_tune.errors import CacheError, MissingEntryError, UsageError

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(TOOLS))
    import _runner

    yield _runner


def raising(error: BaseException) -> Callable[[Sequence[str]], int]:
    def main(arguments: Sequence[str]) -> int:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("no such\nshape"), 2, "error: no such shape"), (MissingEntryError("untuned"), 3, "error: untuned"),
        (CacheError("locked"), 4, "error: locked"), (KeyboardInterrupt(), 130, "interrupted"),
        (ValueError("a"), 1, "error: ValueError: a; --debug shows where"), (SystemExit(0), 0, ""),
    ],
)
def test_an_error_is_one_line_and_its_exit_code(
    runner: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int,
    line: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench"])
    assert runner.run("bench", raising(error)) == code
    assert capsys.readouterr().err == (f"bench: {line}\n" if line else "")


def test_debug_shows_where_and_is_no_argument_of_the_program(
    runner: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--debug", "--steps", "3"])
    given: list[str] = []
    assert runner.run("bench", lambda arguments: len(given.extend(arguments) or arguments)) == 2
    assert given == ["--steps", "3"]
    assert runner.run("bench", raising(ValueError("a"))) == 1
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("Traceback") and last.startswith("bench: error: ValueError: a")


def test_results_that_no_file_could_hold_are_refused_before_work(runner: Any, tmp_path: Path) -> None:
    runner.check_writable("--json", None)
    runner.check_writable("--json", tmp_path / "new.json")
    for path in (tmp_path, tmp_path / "none" / "new.json"):
        with pytest.raises(UsageError, match=r"--json .*existing folder"):
            runner.check_writable("--json", path)


def test_durations_are_written_as_for_the_command_line(runner: Any) -> None:
    options_of = importlib.import_module("record_space").options_of
    for given, budget_s in (("12s", 12.0), ("90", 90.0), ("1h30m", 5400.0)):
        assert options_of(["--cache", "none.sqlite", "--budget", given]).budget == budget_s


@pytest.mark.parametrize(
    ("program", "arguments", "code"),
    [
        ("record_space", ("--cache", "none.sqlite"), 2), ("record_space", ("--chain", "1x8x8"), 2),
        ("record_space", ("--cache", "none.sqlite", "--budget", "12x"), 2),
        ("compare_caches", ("one.sqlite",), 2), ("compare_caches", ("one.sqlite", "two.sqlite"), 4),
        ("bench_plan", ("--entries", "0"), 2), ("stress_cache", ("all",), 2), ("starter_cache", (), 2),
        ("starter_cache", ("--from", "a.sqlite", "--budget", "5m"), 2), ("starter_cache", ("--from", "a.sqlite"), 4),
    ],
)
def test_every_program_says_what_is_wrong_in_one_line(
    runner: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], program: str,
    arguments: tuple[str, ...], code: int, tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    assert runner.run(program, importlib.import_module(program).main) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"{program}: error: ") and err.count("\n") == 1
