"""Clocks by NVML's C interface, on a library of the same interface whose GPU speeds up at every reading."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dmuon_tune.measure.clocks import Clocks, Reading

NVML = """
#include <string.h>
static unsigned mhz = 1000;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    *handle = (void *)0x7ffffffff000;
    return strcmp(uuid, "GPU-known") ? 6 : 0;
}
int nvmlDeviceGetClockInfo(void *device, int kind, unsigned *clock) {
    *clock = mhz;
    mhz += 40;
    return device != (void *)0x7ffffffff000 || kind != 1;
}
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) { *celsius = 61; return sensor; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *why) { *why = 0x5; return 0; }
"""


def test_clock_temperature_and_throttle_reasons_are_read(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "nvml.c").write_text(NVML)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True)
    clocks = Clocks.by_uuid("GPU-known", str(library))
    assert clocks is not None  # the first reading says whether it can be read
    second, third = clocks.read(), clocks.read()
    assert second == Reading(1040, 61, ("power cap",)) and third == Reading(1080, 61, ("power cap",))
    assert second.is_steady_to(third) and third.is_steady_to(second)
    fourth = clocks.read()
    assert fourth is not None and not second.is_steady_to(fourth) and not fourth.is_steady_to(second)
    assert Clocks.by_uuid("GPU-other", str(library)) is None


def test_without_nvml_there_is_nothing_to_read(tmp_path: Path) -> None:
    assert Clocks.by_uuid("GPU-known", str(tmp_path / "libnvidia-ml.so.1")) is None
    assert Clocks.of("cpu") is None
