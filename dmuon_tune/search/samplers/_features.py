"""What the models see of a configuration: logarithms of its numbers, and which powers of two divide them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import Floats, LegalSpace


def features(space: LegalSpace) -> Floats:
    """(configurations, features), each scaled to 0..1: one or two for each axis that has a choice.

    Kernels answer to ratios of sizes, and to whether warps, vectors and banks divide them, whatever the size: 96 may be
    nearer to 64 than 80 is.
    """
    found = [
        _scaled(feature)[places]
        for values, places in zip(space.axes, space.indices.T, strict=True) if len(values) > 1
        for feature in _of_values(values)
    ]
    return np.array(found).reshape(-1, len(space)).T


def _of_values(values: Sequence[Any]) -> list[Floats]:
    """Logarithms of positive numbers, places of anything else; then the power of two in whole numbers, where that says
    more."""
    if not all(isinstance(value, int | float) and value > 0 for value in values):
        return [np.arange(len(values), dtype=np.float64)]
    logs = np.log2(np.array(values, dtype=np.float64))
    if not all(float(value).is_integer() for value in values):
        return [logs]
    powers = np.array([(int(value) & -int(value)).bit_length() - 1 for value in values], dtype=np.float64)
    return [logs, powers] if np.ptp(powers) and (powers != logs).any() else [logs]


def _scaled(feature: Floats) -> Floats:
    scaled: Floats = (feature - feature.min()) / np.ptp(feature)
    return scaled
