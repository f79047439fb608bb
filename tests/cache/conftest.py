"""Sample keys and measurements, and Python processes of their own, for the cache's tests."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dmuon_tune.cache import TuningKey
from dmuon_tune.device import DeviceFingerprint, Toolchain
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem

ROOT = Path(__file__).resolve().parents[2]
DEVICE = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 62914560, 150_000_000_000)
KEY = TuningKey(
    Problem("gram", 8, 2048, 2048, 5464),
    "gram.tilelang",
    "ab" * 32,
    DEVICE,
    Toolchain("tilelang", (("cuda", "12.9"), ("tilelang", "0.1.15"))),
)


@pytest.fixture
def key() -> TuningKey:
    return KEY


@pytest.fixture
def other_keys() -> dict[str, TuningKey]:
    """Keys that differ from ``key`` in one part each, by that part's name."""
    return {
        "problem": replace(KEY, problem=replace(KEY.problem, k=5463)),
        "kernel": replace(KEY, kernel="gram.library"),
        "spec_digest": replace(KEY, spec_digest="cd" * 32),
        "device": replace(KEY, device=replace(DEVICE, sm_count=60)),
        "toolchain": replace(KEY, toolchain=Toolchain("tilelang", (("cuda", "13.0"), ("tilelang", "0.1.15")))),
    }


@pytest.fixture
def ok() -> Callable[..., Measurement]:
    """``ok(median_us)``: an ok measurement with three windows around its median."""

    def make(median_us: float, **resources: Any) -> Measurement:
        return Measurement.from_samples([median_us * 0.9, median_us, median_us * 1.1], 1e-3, resources)

    return make


@pytest.fixture
def damage_trials() -> Callable[[Path], None]:
    """``damage_trials(path)``: the trials' pages become garbage, everything that opening reads stays whole."""

    def damage(path: Path) -> None:
        connection = sqlite3.connect(path)
        pages = connection.execute("SELECT rootpage FROM sqlite_master WHERE tbl_name = 'dmuon_trials'").fetchall()
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
        connection.close()
        content = bytearray(path.read_bytes())
        for (page,) in pages:
            content[(page - 1) * page_bytes : (page - 1) * page_bytes + 64] = b"\xff" * 64
        path.write_bytes(content)

    return damage


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DMUON_TUNE_")]:
        monkeypatch.delenv(name)


Spawn = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def spawn(request: pytest.FixtureRequest) -> Spawn:
    """``spawn(code, *arguments, **environ)``: Python running the code on this checkout; killed after the test."""

    def start(code: str, *arguments: object, **environ: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            cwd="/",
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        request.addfinalizer(process.wait)
        request.addfinalizer(process.kill)
        return process

    return start
