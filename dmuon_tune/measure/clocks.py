"""Reads a GPU's SM clock, temperature and throttle reasons from NVML; where there is none, nothing."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

LIBRARY = "libnvidia-ml.so.1"  # comes with the driver; called by its C interface, so no Python package is needed
REASONS, OLD_REASONS = "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
CLOCK_SM, TEMPERATURE_GPU = 1, 0  # nvml.h: nvmlClockType_t, nvmlTemperatureSensors_t
THROTTLE_REASONS = {  # nvml.h: nvmlClocksEventReason*; bit 0, an idle GPU, is no reason
    0x2: "application clocks", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost", 0x20: "thermal",
    0x40: "hardware thermal", 0x80: "power brake", 0x100: "display clock",
}
STEADY = 1.05  # a clock that moves by a larger factor changes a kernel's time by more than its own noise


@dataclass(frozen=True)
class Reading:
    """A GPU at one moment: SM clock in MHz, temperature in °C, why its clock is held below its highest."""

    sm_mhz: int
    temperature_c: int
    throttle: tuple[str, ...]

    def is_steady_to(self, later: Reading) -> bool:
        """Whether the clock moved by no more than STEADY until a later reading."""
        low, high = sorted((self.sm_mhz, later.sm_mhz))
        return high <= STEADY * low

    def to_dict(self) -> dict[str, Any]:
        """As it is kept in a measurement's resources."""
        return {"sm_mhz": self.sm_mhz, "temperature_c": self.temperature_c, "throttle": list(self.throttle)}


class Clocks:
    """One GPU's clocks; :meth:`of` is None where they cannot be read."""

    def __init__(self, nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._nvml, self._handle = nvml, handle

    @classmethod
    def of(cls, device: str) -> Clocks | None:
        """The clocks of ``cuda`` or ``cuda:<index>``; of ``cpu`` none."""
        if not device.startswith("cuda"):
            return None
        properties: Any = torch.cuda.get_device_properties(torch.device(device).index or 0)
        uuid = getattr(properties, "uuid", None)
        return None if uuid is None else cls.by_uuid(f"GPU-{str(uuid).removeprefix('GPU-')}")

    @classmethod
    def by_uuid(cls, uuid: str, library: str = LIBRARY) -> Clocks | None:
        """The clocks of the GPU with this UUID, where ``library`` loads and knows it."""
        try:
            nvml = ctypes.CDLL(library)
            handle = ctypes.c_void_p()
            failed = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
        except (OSError, AttributeError):  # no driver here, or an older library
            return None
        clocks = cls(nvml, handle)
        return None if failed or clocks.read() is None else clocks

    def read(self) -> Reading | None:
        """The GPU now; None where NVML answers with an error."""
        mhz, celsius, reasons = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_ulonglong()
        try:
            read_reasons = getattr(self._nvml, REASONS, None) or getattr(self._nvml, OLD_REASONS)
            failed = (
                self._nvml.nvmlDeviceGetClockInfo(self._handle, CLOCK_SM, ctypes.byref(mhz))
                or self._nvml.nvmlDeviceGetTemperature(self._handle, TEMPERATURE_GPU, ctypes.byref(celsius))
                or read_reasons(self._handle, ctypes.byref(reasons))
            )
        except AttributeError:
            return None
        if failed or not mhz.value:
            return None
        names = (name for bit, name in THROTTLE_REASONS.items() if reasons.value & bit)
        return Reading(mhz.value, celsius.value, tuple(names))
