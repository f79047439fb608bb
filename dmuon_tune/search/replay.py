"""Replays samplers against a record: how near to the optimum each comes in how many evaluations, without a device."""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np

from dmuon_tune.errors import UsageError
from dmuon_tune.processes import processors

from .asked import AskedSampler
from .record import Record
from .samplers import Floats, sampler_type

MARKS = (10, 25, 50, 100, 200, 400, 800)  # evaluations at which a table says how far a sampler came
NEAR = 0.97  # of the optimum: what a search is stopped at by a tuner in a hurry
PROCESS_EVALUATIONS = 2000  # that make up for a process's start
MOST_EVALUATIONS = 10**7  # in all: a gigabyte, and hours by the quickest sampler that learns
RUN_EVALUATIONS = 50  # whose memory a run takes beside its own


@dataclass(frozen=True)
class Curve:
    """One sampler on one record: ``fractions`` (seeds, evaluations) of the optimum that were reached, 1 at best, after
    so many ``seconds``, None where the record does not say how long a configuration takes."""

    record: Record
    sampler: str
    fractions: Floats
    seconds: Floats | None = None

    def at(self, evaluations: int) -> tuple[float, float, float]:
        """Median, 10th and 90th percentile over the seeds."""
        median, low, high = np.quantile(self.fractions[:, evaluations - 1], (0.5, 0.1, 0.9))
        return float(median), float(low), float(high)

    def marks(self) -> list[int]:
        """Where the curve is told: the usual numbers of evaluations up to its end, and its end."""
        end = self.fractions.shape[1]
        return [mark for mark in MARKS if mark < end] + [end]

    def evaluations_to(self, fraction: float) -> int | None:
        """In how many evaluations half of the seeds reach a fraction of the optimum, None where they don't."""
        reached = np.flatnonzero(np.median(self.fractions, axis=0) >= fraction)
        return int(reached[0]) + 1 if len(reached) else None

    def seconds_to(self, fraction: float) -> float | None:
        """After how many seconds half of the seeds have reached it, None where they don't, or nobody knows."""
        if self.seconds is None:
            return None
        found = [
            seconds[np.argmax(fractions >= fraction)] if fractions[-1] >= fraction else np.inf
            for fractions, seconds in zip(self.fractions, self.seconds, strict=True)
        ]
        middle = float(np.median(found))
        return middle if np.isfinite(middle) else None


def replay(
    records: Sequence[Record], names: Sequence[str], evaluations: int, seeds: int, workers: int = 1
) -> list[Curve]:
    """Each sampler of ``names`` on each record, with the seeds 0, 1, …, a blind one once and to the end, in seconds as
    if so many ``workers`` compiled beside each other; UsageError for an unknown name, a faulty sampler, or more than
    MOST_EVALUATIONS.

    Long replays run on all processors; equal arguments give equal curves.
    """
    is_blind = {name: sampler_type(name).is_blind for name in names}
    curves = [
        (record, name, len(record.rows) if is_blind[name] else min(evaluations, len(record.rows)))
        for record in records for name in names
    ]
    seeds_of = {name: 1 if is_blind[name] else seeds for name in names}
    total = sum(seeds_of[name] * length for _, name, length in curves)
    if total + sum(seeds_of[name] * RUN_EVALUATIONS for _, name, _ in curves) > MOST_EVALUATIONS:
        raise UsageError(
            f"{total} evaluations, by {seeds} seeds, are more than a replay can hold; lower --seeds or --evaluations"
        )
    tasks = ((*curve, seed) for curve in curves for seed in range(seeds_of[curve[1]]))
    processes = min(processors(), total // PROCESS_EVALUATIONS)
    if processes > 1:
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            runs = iter(list(pool.map(_run, tasks)))
    else:
        runs = map(_run, tasks)
    return [
        _curve(record, name, [next(runs) for _ in range(seeds_of[name])], workers) for record, name, _ in curves
    ]


def _curve(record: Record, name: str, runs: Sequence[tuple[list[float], list[int]]], workers: int) -> Curve:
    fractions = np.array([reached for reached, _ in runs])
    if not record.has_costs:
        return Curve(record, name, fractions)
    rows = np.array([rows for _, rows in runs])
    return Curve(record, name, fractions, np.cumsum(record.costs_s(workers)[rows], axis=1))


def _run(task: tuple[Record, str, int, int]) -> tuple[list[float], list[int]]:
    return run(*task)


def run(record: Record, name: str, evaluations: int, seed: int) -> tuple[list[float], list[int]]:
    """The fraction of the optimum that one sampler has reached after each evaluation, 0 before the first ok one, and
    the rows that it evaluated."""
    space = record.legal_space()
    sampler = AskedSampler(sampler_type(name), space, seed, record.first)
    is_unseen = np.ones(len(space), dtype=bool)
    optimum_us, best_us, reached, rows = record.best_us, np.inf, [], []
    for _ in range(evaluations):
        row = sampler.pick(is_unseen)
        time_us = record.times_us[row]
        sampler.observe(row, time_us)
        best_us = min(best_us, np.inf if time_us is None else time_us)
        reached.append(float(optimum_us / best_us))
        rows.append(row)
    return reached, rows


def plot(curves: Sequence[Curve], kind: str, plt: Any) -> bytes:
    """The medians with their bands, a panel a record, as an image of a ``kind`` such as png; ``plt``:
    matplotlib.pyplot."""
    records = list(dict.fromkeys(id(curve.record) for curve in curves))
    figure, panels = plt.subplots(1, len(records), figsize=(6 * len(records), 4), squeeze=False, sharey=True)
    for panel, record in zip(panels[0], records, strict=True):
        for curve in (curve for curve in curves if id(curve.record) == record):
            low, median, high = np.quantile(curve.fractions, (0.1, 0.5, 0.9), axis=0)
            evaluations = np.arange(1, len(median) + 1)
            (line,) = panel.plot(evaluations, median, label=curve.sampler)
            panel.fill_between(evaluations, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
            panel.set_title(f"{curve.record.kernel}: {curve.record.problem}\n{curve.record.device}", fontsize=9)
        panel.set_xlabel("evaluations")
        panel.grid(alpha=0.3)
        panel.legend(loc="lower right")
    panels[0][0].set_ylabel("fraction of the optimum (median, p10 to p90)")
    figure.tight_layout()
    image = io.BytesIO()
    figure.savefig(image, format=kind, dpi=150)
    plt.close(figure)
    return image.getvalue()
