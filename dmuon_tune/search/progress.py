"""Shows on stderr what a tuning run is trying, the best so far and the time left."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Recipe
from dmuon_tune.words import counted

from .shares import CHAINS_SHARE, RACE_S

PLAIN_INTERVAL_S = 10.0
PACE_RESULTS = 30  # the latest results that tell the pace: kernels of another problem may take longer


class Progress(Protocol):
    """Told of a tuning run's events, from the thread that tunes."""

    def started(self, total: int, budget_s: float | None, races: int) -> None:
        """``total`` configurations will be measured, fewer where ``budget_s`` seconds end the run before; then the
        finalists of so many problems race, and whole chains are timed."""

    def settled(self, count: int) -> None:
        """A problem's search ended early: ``count`` fewer configurations are measured."""

    def trying(self, problem: Problem, kernel: str, config: dict[str, Any]) -> None:
        """A configuration goes to a measuring process."""

    def measured(
        self, problem: Problem, kernel: str, config: dict[str, Any], measurement: Measurement, best_us: float | None
    ) -> None:
        """A configuration's result is in the cache; ``best_us`` is the problem's fastest median so far."""

    def reused(self, count: int) -> None:
        """Other runs have measured ``count`` of the configurations meanwhile."""

    def waiting(self, count: int, hosts: Sequence[str]) -> None:
        """All that is left, ``count`` problems or groups, is under way in other runs, on ``hosts``."""

    def races_started(self, races: int, left_s: float | None) -> None:
        """The finalists of so many problems will be timed against each other; the run ends in ``left_s`` seconds."""

    def raced(self, problem: Problem, kernel: str, measurement: Measurement) -> None:
        """A problem's race is over, and what won."""

    def chains_started(self, groups: int, left_s: float | None) -> None:
        """The products are done; chains of ``groups`` groups will be timed, for ``left_s`` seconds at most."""

    def timed(self, recipe: Recipe, measurement: Measurement, best_us: float | None) -> None:
        """A chain's result is in the cache; ``best_us`` is the group's fastest median so far."""

    def finished(self) -> None:
        """The run ended, in whatever way."""


class Silent:
    """Shows nothing."""

    def started(self, total: int, budget_s: float | None, races: int) -> None:
        pass

    def settled(self, count: int) -> None:
        pass

    def trying(self, problem: Problem, kernel: str, config: dict[str, Any]) -> None:
        pass

    def measured(
        self, problem: Problem, kernel: str, config: dict[str, Any], measurement: Measurement, best_us: float | None
    ) -> None:
        pass

    def reused(self, count: int) -> None:
        pass

    def waiting(self, count: int, hosts: Sequence[str]) -> None:
        pass

    def races_started(self, races: int, left_s: float | None) -> None:
        pass

    def raced(self, problem: Problem, kernel: str, measurement: Measurement) -> None:
        pass

    def chains_started(self, groups: int, left_s: float | None) -> None:
        pass

    def timed(self, recipe: Recipe, measurement: Measurement, best_us: float | None) -> None:
        pass

    def finished(self) -> None:
        pass


class Clock:
    """Counts what is done and estimates the time left of the whole run: the budget's, or less by the pace of the latest
    results, with ``races`` that follow and the chains' share of it all; ``before_s`` went by before this part."""

    def __init__(self, total: int, budget_s: float | None, races: int = 0, before_s: float = 0.0) -> None:
        self.total, self.done = total, 0
        self._budget_s, self._races, self._before_s = budget_s, races, before_s
        self._start = time.monotonic()
        self._ends = deque([self._start], PACE_RESULTS + 1)

    @property
    def passed_s(self) -> float:
        """Since the run began."""
        return self._before_s + time.monotonic() - self._start

    def count(self) -> None:
        """One more is done."""
        self.done += 1
        self._ends.append(time.monotonic())

    def left(self) -> str:
        """``m:ss`` left, or ``-:--`` while nothing is known."""
        bounds = []
        if self.done:
            pace_s = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
            products_s = self.passed_s + pace_s * max(0, self.total - self.done) + RACE_S * self._races
            bounds.append(products_s / (1 - CHAINS_SHARE) - self.passed_s)
        if self._budget_s is not None:
            bounds.append(max(0.0, self._budget_s - (time.monotonic() - self._start)))
        return f"{int(min(bounds)) // 60}:{int(min(bounds)) % 60:02d}" if bounds else "-:--"


class TerminalBar:
    """A bar for a terminal; rich leaves colours out where NO_COLOR is set."""

    def __init__(self, stream: TextIO) -> None:
        self._bar = Bar(
            TextColumn("tuning"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]} left"),
            TextColumn("{task.fields[doing]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=Console(file=stream),
            transient=True,
        )
        self._clock = Clock(0, None)

    def started(self, total: int, budget_s: float | None, races: int) -> None:
        self._clock = Clock(total, budget_s, races)
        self._task = self._bar.add_task("tuning", total=total, left=self._clock.left(), doing="")
        self._bar.start()

    def settled(self, count: int) -> None:
        self.reused(count)

    def trying(self, problem: Problem, kernel: str, config: dict[str, Any]) -> None:
        self._bar.update(self._task, left=self._clock.left(), doing=_trying(problem, kernel, config))

    def measured(
        self, problem: Problem, kernel: str, config: dict[str, Any], measurement: Measurement, best_us: float | None
    ) -> None:
        self._clock.count()
        doing = f"{problem.label()}: {_outcome(kernel, measurement, best_us)}"
        self._bar.update(self._task, advance=1, left=self._clock.left(), doing=doing)

    def reused(self, count: int) -> None:
        self._clock.total -= count
        self._bar.update(self._task, total=self._clock.total, left=self._clock.left())

    def waiting(self, count: int, hosts: Sequence[str]) -> None:
        self._bar.update(self._task, left=self._clock.left(), doing=_waiting(count, hosts))

    def races_started(self, races: int, left_s: float | None) -> None:
        self._clock = Clock(races, left_s, before_s=self._clock.passed_s)
        self._task = self._bar.add_task("races", total=races, left=self._clock.left(), doing=_races_of(races))
        self._bar.start()

    def raced(self, problem: Problem, kernel: str, measurement: Measurement) -> None:
        self._clock.count()
        doing = _race_outcome(problem, kernel, measurement)
        self._bar.update(self._task, advance=1, left=self._clock.left(), doing=doing)

    def chains_started(self, groups: int, left_s: float | None) -> None:
        self._clock = Clock(0, left_s)
        doing = _chains_of(groups)
        self._task = self._bar.add_task("chains", total=None, left=self._clock.left(), doing=doing)
        self._bar.start()

    def timed(self, recipe: Recipe, measurement: Measurement, best_us: float | None) -> None:
        self._bar.update(
            self._task, advance=1, left=self._clock.left(), doing=_chain_outcome(recipe, measurement, best_us)
        )

    def finished(self) -> None:
        self._bar.stop()


class PlainLines:
    """A line now and then for a log file: the first and the last result, and one in ten seconds between."""

    def __init__(self, stream: TextIO, interval_s: float = PLAIN_INTERVAL_S) -> None:
        self._stream = stream
        self._interval_s = interval_s
        self._clock = Clock(0, None)
        self._next, self._waited = 0.0, ""

    def started(self, total: int, budget_s: float | None, races: int) -> None:
        self._clock = Clock(total, budget_s, races)

    def settled(self, count: int) -> None:
        self._clock.total -= count

    def trying(self, problem: Problem, kernel: str, config: dict[str, Any]) -> None:
        pass

    def measured(
        self, problem: Problem, kernel: str, config: dict[str, Any], measurement: Measurement, best_us: float | None
    ) -> None:
        clock = self._clock
        clock.count()
        if time.monotonic() >= self._next or clock.done == clock.total:
            self._next = time.monotonic() + self._interval_s
            outcome = _outcome(kernel, measurement, best_us)
            self._write(f"tuning {clock.done}/{clock.total}, {clock.left()} left; {problem.label()}: {outcome}")

    def reused(self, count: int) -> None:
        self._clock.total -= count

    def waiting(self, count: int, hosts: Sequence[str]) -> None:
        line = _waiting(count, hosts)
        if line != self._waited or time.monotonic() >= self._next:
            self._waited, self._next = line, time.monotonic() + self._interval_s
            self._write(line)

    def races_started(self, races: int, left_s: float | None) -> None:
        self._clock = Clock(races, left_s, before_s=self._clock.passed_s)
        self._write(f"timing {_races_of(races)}")

    def raced(self, problem: Problem, kernel: str, measurement: Measurement) -> None:
        clock = self._clock
        clock.count()
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._interval_s
            outcome = _race_outcome(problem, kernel, measurement)
            self._write(f"race {clock.done}/{clock.total}, {clock.left()} left; {outcome}")

    def chains_started(self, groups: int, left_s: float | None) -> None:
        self._clock = Clock(0, left_s)
        self._write(f"timing {_chains_of(groups)}")

    def timed(self, recipe: Recipe, measurement: Measurement, best_us: float | None) -> None:
        self._clock.count()
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._interval_s
            self._write(f"timing chain {self._clock.done}; {_chain_outcome(recipe, measurement, best_us)}")

    def finished(self) -> None:
        pass

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def terminal_progress(stream: TextIO | None = None) -> Progress:
    """A bar where ``stream`` (stderr) is a terminal, else plain lines."""
    target = sys.stderr if stream is None else stream
    return TerminalBar(target) if target.isatty() else PlainLines(target)


def _trying(problem: Problem, kernel: str, config: dict[str, Any]) -> str:
    values = " ".join(f"{name}={value}" for name, value in config.items())
    return f"{problem.label()}: {kernel.partition('.')[2]} {values}"


def _outcome(kernel: str, measurement: Measurement, best_us: float | None) -> str:
    return f"{kernel.partition('.')[2]} {_result(measurement, best_us)}"


def _waiting(count: int, hosts: Sequence[str]) -> str:
    return f"waiting for {count} that other runs tune, on {', '.join(hosts)}"


def _races_of(races: int) -> str:
    return f"the finalists of {counted(races, 'problem')}"


def _race_outcome(problem: Problem, kernel: str, measurement: Measurement) -> str:
    return f"{problem.label()}: {kernel.partition('.')[2]} wins, {_result(measurement, None)}"


def _chains_of(groups: int) -> str:
    return f"the chains of {counted(groups, 'group')}"


def _chain_outcome(recipe: Recipe, measurement: Measurement, best_us: float | None) -> str:
    pieces = "" if recipe.chunk is None else f" in {counted(len(recipe.pieces), 'piece')}"
    return f"{recipe.group.label()}: {recipe.form} chain{pieces} {_result(measurement, best_us)}"


def _result(measurement: Measurement, best_us: float | None) -> str:
    result = f"{measurement.median_us:.1f} us" if measurement.median_us is not None else measurement.status
    result += ", disturbed" if measurement.disturbed else ""
    return result + ("" if best_us is None else f", best {best_us:.1f} us")
