"""Where and when a result came to be, and how it was checked: kept beside it, never a part of its key."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from dmuon_tune import __version__
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.measure.verify import VALIDATION

CHAIN_VALIDATION = "polar error against float64 near the plain form's, outputs full of NaN before, two runs bit-equal"


def of_run(device: DeviceFingerprint, seed: int) -> dict[str, Any]:
    """What all results of a run share."""
    return {
        "tool": f"dmuon-tune {__version__}",
        "torch": torch.__version__,
        "driver": driver_version() if device.kind == "cuda" else "",
        "device": device.name,
        "seed": seed,
        "validation": VALIDATION,
    }


def driver_version() -> str:
    """The NVIDIA kernel driver's version, empty where Linux does not show it."""
    try:
        found = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return ""
    return found.group(1) if found else ""


def now(timespec: str = "seconds") -> str:
    """ISO 8601, in UTC."""
    return datetime.now(UTC).isoformat(timespec=timespec)
