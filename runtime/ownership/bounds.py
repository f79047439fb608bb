"""Times that no assignment's slowest owner can beat."""

from __future__ import annotations

import numpy as np

from .instance import Instance


def simple_bound(instance: Instance) -> float:
    """Microseconds: every matrix at its class's best rate, shared equally; or the longest one alone."""
    batches = np.arange(1, instance.table.shape[1])
    rates = (instance.table[:, 1:] / batches).min(axis=1)
    return float(max(rates @ instance.counts / instance.owners, instance.table[:, 1:].min(axis=1).max()))
