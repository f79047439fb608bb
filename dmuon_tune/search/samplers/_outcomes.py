"""What the models learn from: logarithms of times, failures as slow ones, what is under way as middling."""

from __future__ import annotations

import numpy as np

from . import Floats, Ints, Sampler

LEAST = 8  # ok outcomes before a model is of use
MOST = 160  # outcomes that a model learns from, so that a pick takes less than 50 ms; the fastest half of them is kept


def is_ready(sampler: Sampler) -> bool:
    return sum(time_us is not None for time_us in sampler.times_us.values()) >= LEAST


def learned(sampler: Sampler) -> tuple[Ints, Floats]:
    """(rows, values) of what is known; at least one outcome is ok. A failure counts as the slowest, which keeps the
    model away; what is under way as the median, so that picks made at the same time spread."""
    rows = np.array([*sampler.times_us, *sampler.pending], dtype=np.int64)
    times = np.array([np.nan if time_us is None else time_us for time_us in sampler.times_us.values()])
    values = np.log(np.where(np.isnan(times), np.nanmax(times), times))
    values = np.concatenate([values, np.full(len(sampler.pending), np.median(values))])
    if len(rows) > MOST:
        order = np.argsort(values, kind="stable")
        rest = sampler.rng.choice(order[MOST // 2 :], MOST - MOST // 2, replace=False)
        kept = np.concatenate([order[: MOST // 2], rest])
        rows, values = rows[kept], values[kept]
    return rows, values
