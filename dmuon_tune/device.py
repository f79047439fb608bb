"""What a tuning result depends on besides the problem: the device's limits and a backend's toolchain."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MAX_REGISTERS_PER_THREAD = 255
REGISTERS_PER_BLOCK = 65536  # CUDA C++ Programming Guide, compute capabilities 8.0 to 12.0


@dataclass(frozen=True)
class DeviceFingerprint:
    """The limits of one device model; never a rank or a device index.

    ``arch`` is ``sm_90`` for a GPU and ``cpu-<machine>-<instruction set>`` for a CPU. ``sm_count`` counts the
    multiprocessors (a CPU's usable cores). The name is informational: it takes no part in equality.
    """

    name: str = field(compare=False)
    arch: str
    sm_count: int
    smem_per_block_bytes: int
    l2_bytes: int
    memory_bytes: int

    @property
    def kind(self) -> str:
        """``cuda`` or ``cpu``: the torch device type that runs here."""
        return "cuda" if self.arch.startswith("sm_") else "cpu"

    @property
    def sm(self) -> int:
        """Compute capability as an integer (90 for sm_90); 0 on a CPU."""
        return int(self.arch.removeprefix("sm_")) if self.kind == "cuda" else 0

    def limits(self) -> dict[str, Any]:
        """The fields that decide whether a result applies: all but the product's name."""
        return {name: value for name, value in vars(self).items() if name != "name"}

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> DeviceFingerprint:
        return cls(**fields)


@dataclass(frozen=True)
class Toolchain:
    """Versions that change the code one backend generates: (component, version) pairs in name order."""

    backend: str
    versions: tuple[tuple[str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        return {"backend": self.backend, "versions": dict(self.versions)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Toolchain:
        return cls(fields["backend"], tuple(sorted(fields["versions"].items())))

    def label(self) -> str:
        return " ".join(f"{name} {version}" for name, version in self.versions)
