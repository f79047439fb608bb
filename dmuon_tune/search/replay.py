"""Replays samplers against a record: how near to the optimum each comes in how many evaluations, without a device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np

from .record import Record
from .samplers import Floats, sampler_type

MARKS = (10, 25, 50, 100, 200, 400, 800)  # evaluations at which a table says how far a sampler came
NEAR = 0.97  # of the optimum: what a search is stopped at by a tuner in a hurry
PROCESS_EVALUATIONS = 2000  # that make up for a process's start


@dataclass(frozen=True)
class Curve:
    """One sampler on one record: ``fractions`` (seeds, evaluations) of the optimum that were reached, 1 at best."""

    record: Record
    sampler: str
    fractions: Floats

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


def replay(records: Sequence[Record], names: Sequence[str], evaluations: int, seeds: int) -> list[Curve]:
    """Each sampler of ``names`` on each record, with the seeds 0, 1, …; UsageError for an unknown name.

    Long replays run on all processors; equal arguments give equal curves.
    """
    for name in names:
        sampler_type(name)
    tasks = [
        (record, name, min(evaluations, len(record.rows)), seed)
        for record in records for name in names for seed in range(seeds)
    ]
    workers = min(len(os.sched_getaffinity(0)), len(tasks) * evaluations // PROCESS_EVALUATIONS)
    if workers > 1:
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            runs = iter(list(pool.map(_run, tasks)))
    else:
        runs = map(_run, tasks)
    return [
        Curve(record, name, np.array([next(runs) for _ in range(seeds)]))
        for record in records for name in names
    ]


def _run(task: tuple[Record, str, int, int]) -> list[float]:
    return run(*task)


def run(record: Record, name: str, evaluations: int, seed: int) -> list[float]:
    """The fraction of the optimum that one sampler has reached after each evaluation; 0 before the first ok one."""
    space = record.legal_space()
    picks = sampler_type(name)(space, seed, record.first)
    is_unseen = np.ones(len(space), dtype=bool)
    best_us, reached = np.inf, []
    for _ in range(evaluations):
        row = picks.pick(np.flatnonzero(is_unseen))
        is_unseen[row] = False
        time_us = record.times_us[row]
        picks.observe(row, time_us)
        best_us = min(best_us, np.inf if time_us is None else time_us)
        reached.append(float(record.best_us / best_us))
    return reached


def plot(curves: Sequence[Curve], path: str, plt: Any) -> None:
    """Draw the medians with their bands, a panel a record; ``plt``: matplotlib.pyplot."""
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
    figure.savefig(path, dpi=150)
    plt.close(figure)
