"""The caches that this package ships, each for one device model: where they lie."""

from __future__ import annotations

from pathlib import Path

from dmuon_tune.device import DeviceFingerprint

VARIABLE = "DMUON_TUNE_STARTER"  # 0: none
H200 = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 60 * 2**20, 140 * 2**30)


def h200() -> tuple[Path, DeviceFingerprint]:
    """What ``tools/starter_cache.py`` wrote."""
    return Path(__file__).with_name("h200.sqlite"), H200
