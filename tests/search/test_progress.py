"""Progress on a terminal and in a log file."""

from __future__ import annotations

import io

import pytest

from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, Recipe
from dmuon_tune.search.progress import PlainLines, TerminalBar, terminal_progress

PROBLEM = Problem("gram", 1, 8, 8, 8)
OK = Measurement.from_samples([12.3], 0.0, {})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_file_gets_plain_lines_now_and_then() -> None:
    stream = io.StringIO()
    progress = terminal_progress(stream)
    progress.started(3, 60.0, 0)
    for _ in range(3):
        progress.trying(PROBLEM, "gram.library", {"entry": "addmm"})
        progress.measured(PROBLEM, "gram.library", {"entry": "addmm"}, OK, 12.3)
    progress.finished()
    lines = stream.getvalue().splitlines()
    assert isinstance(progress, PlainLines) and len(lines) == 2
    assert lines[0].startswith("tuning 1/3, 0:0")
    assert lines[0].endswith("gram 1x8x8x8 float16 row: library 12.3 us, best 12.3 us")
    assert lines[1].startswith("tuning 3/3, 0:00 left")


def test_the_time_left_counts_the_races_and_chains_that_follow() -> None:
    stream = io.StringIO()
    progress = PlainLines(stream, interval_s=0.0)
    progress.started(1, None, 30)
    progress.measured(PROBLEM, "gram.library", {"entry": "addmm"}, OK, 12.3)
    progress.races_started(30, None)
    progress.raced(PROBLEM, "gram.library", OK)
    product, *_, race = stream.getvalue().splitlines()
    assert "tuning 1/1, 1:1" in product, "30 races of 2 s, and 15 % of it all for chains"
    assert "race 1/30, " in race
    limited = PlainLines(stream, interval_s=0.0)
    limited.started(1, 7.0, 30)
    limited.measured(PROBLEM, "gram.library", {"entry": "addmm"}, OK, 12.3)
    assert "tuning 1/1, 0:0" in stream.getvalue().splitlines()[-1]


def test_a_disturbed_chain_is_said_to_be() -> None:
    stream = io.StringIO()
    disturbed = Measurement.from_samples([12.3], 0.0, {"contended": True})
    PlainLines(stream).timed(Recipe(Group(1, 8, 8), "gram", "float32"), disturbed, 12.3)
    assert "gram chain 12.3 us, disturbed, best 12.3 us" in stream.getvalue()


def test_chains_are_said_in_a_log_file_and_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    recipe = Recipe(Group(16, 1024, 4096), "gram", "float16", chunk=4)
    for stream in (io.StringIO(), Terminal()):
        progress = terminal_progress(stream)
        progress.chains_started(1, 60.0)
        progress.timed(recipe, OK, 12.3)
        progress.finished()
        said = stream.getvalue()
        assert "chains of 1 group" in said and "16x1024x4096: gram chain in 4 pieces 12.3 us" in said


def test_other_runs_are_said_in_a_log_file_and_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    for stream in (io.StringIO(), Terminal()):
        progress = terminal_progress(stream)
        progress.started(3, None, 1)
        progress.reused(2)
        progress.measured(PROBLEM, "gram.library", {"entry": "addmm"}, OK, 12.3)
        for _ in range(2):
            progress.waiting(4, ("node-1", "node-2"))
        progress.finished()
        said = stream.getvalue()
        assert "1/1" in said and "waiting for 4 that other runs tune, on node-1, node-2" in said
        assert isinstance(progress, TerminalBar) or said.count("waiting") == 1


def test_a_terminal_gets_a_bar_without_colours_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    progress = terminal_progress(stream)
    progress.started(2, None, 1)
    progress.trying(PROBLEM, "gram.library", {"entry": "addmm"})
    progress.measured(PROBLEM, "gram.library", {"entry": "addmm"}, Measurement("crashed"), None)
    progress.finished()
    assert isinstance(progress, TerminalBar)
    assert "library crashed" in stream.getvalue() and "1/2" in stream.getvalue()
    assert "\x1b[3" not in stream.getvalue()
