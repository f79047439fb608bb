"""Reads the fingerprint of the device that torch would use."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.errors import UsageError
from dmuon_tune.processes import processors
from dmuon_tune.words import counted

GIB = 2**30


@cache
def fingerprint(device: str = "auto") -> DeviceFingerprint:
    """The fingerprint of ``auto`` (a GPU where there is one), ``cpu``, ``cuda`` or ``cuda:<index>``."""
    resolved = resolve(device)
    return _cpu() if resolved == "cpu" else _cuda(torch.device(resolved))


def resolve(device: str) -> str:
    """``auto`` → ``cuda`` or ``cpu``; UsageError for a device that is not here."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"unknown device {device!r}; use auto, cpu, cuda or cuda:<index>") from error
    if parsed.type == "cpu":
        if parsed.index:
            raise UsageError(f"device {device!r} asked, but all of this machine's CPUs are one device; use cpu")
        return "cpu"
    if parsed.type != "cuda":
        raise UsageError(f"device type {parsed.type!r} is not supported; use cpu or cuda")
    if not torch.cuda.is_available():
        raise UsageError(f"device {device!r} asked, but torch sees no GPU; use --device cpu or ask 'dmuon-tune doctor'")
    if (parsed.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device {device!r} asked, but torch sees {counted(torch.cuda.device_count(), 'GPU')}")
    return device


def resolve_alike(devices: Sequence[str]) -> tuple[str, ...]:
    """Each of these devices once, by its own name; UsageError where one is not here, or they are not all alike: what is
    measured on one of them is kept for all."""
    found = [resolve(device) for device in devices]
    if len(found) > 1:
        found = list(dict.fromkeys("cuda:0" if name == "cuda" else name for name in found))
    first = fingerprint(found[0]).limits()
    for name in found[1:]:
        other = fingerprint(name).limits()
        differing = next((field for field, value in first.items() if other[field] != value), None)
        if differing is not None:
            raise UsageError(
                f"devices {found[0]} and {name} are not alike: {differing} {first[differing]} and {other[differing]}; "
                "tune each kind in a run of its own"
            )
    return tuple(found)


def _cuda(device: torch.device) -> DeviceFingerprint:
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the opt-in shared memory
    return DeviceFingerprint(
        name=properties.name,
        arch=f"sm_{properties.major}{properties.minor}",
        sm_count=properties.multi_processor_count,
        smem_per_block_bytes=properties.shared_memory_per_block_optin,
        l2_bytes=properties.L2_cache_size,
        memory_bytes=round(properties.total_memory / GIB) * GIB,  # what a driver keeps of it differs by megabytes
    )


def _cpu() -> DeviceFingerprint:
    # get_cpu_capability names the widest instruction set that torch's kernels use here (AVX2, AVX512, ...).
    isa = torch.backends.cpu.get_cpu_capability().lower()
    return DeviceFingerprint(
        name=_cpu_name(),
        arch=f"cpu-{platform.machine()}-{isa}",
        sm_count=processors(),
        smem_per_block_bytes=0,
        l2_bytes=_cpu_cache_bytes(),
        memory_bytes=0,  # a container's memory limit changes no CPU kernel
    )


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cpu_cache_bytes() -> int:
    """Size of the largest cache of the first core as Linux reports it; 32 MiB where it does not."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * 1024)
    return max(sizes, default=32 * 2**20)
