"""TuningKey: what a tuning result was measured for, as canonical JSON and its SHA-256."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dmuon_tune.device import DeviceFingerprint, Toolchain
from dmuon_tune.problem import Problem


@dataclass(frozen=True)
class TuningKey:
    """One problem, one kernel's code, one device model, one toolchain, one way to check results: a change in any part
    is another key.

    ``kernel`` is the spec's name (``op.backend``), ``spec_digest`` the SHA-256 of its code. The device counts by its
    limits alone: the same silicon under another product name has the same key. ``validation`` says how strictly an ok
    result was checked; empty in the key of a result from before it took part, which has the text that it had.
    """

    problem: Problem
    kernel: str
    spec_digest: str
    device: DeviceFingerprint
    toolchain: Toolchain
    validation: str = ""

    def canonical_json(self) -> str:
        """Equal keys give equal text, on every machine and in every process."""
        return json.dumps({**self.to_dict(), "device": self.device.limits()}, sort_keys=True, separators=(",", ":"))

    @cached_property
    def sha256(self) -> str:
        """Hexadecimal SHA-256 of :meth:`canonical_json`."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Every field, the device's name included, as JSON types."""
        return {
            "problem": self.problem.to_dict(),
            "kernel": self.kernel,
            "spec_digest": self.spec_digest,
            "device": self.device.to_dict(),
            "toolchain": self.toolchain.to_dict(),
            **({"validation": self.validation} if self.validation else {}),
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> TuningKey:
        return cls(
            Problem.from_dict(fields["problem"]),
            fields["kernel"],
            fields["spec_digest"],
            DeviceFingerprint.from_dict(fields["device"]),
            Toolchain.from_dict(fields["toolchain"]),
            fields.get("validation", ""),
        )
