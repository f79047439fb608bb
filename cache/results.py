"""Results as values: what one configuration did under its key, of the winners and of everything that was tried."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dmuon_tune.measurement import Measurement

from .key import TuningKey
from .models import IMPORTED, canonical


@dataclass(frozen=True)
class CacheEntry:
    """A configuration's best outcome under its key; as an entry it is that key's winner: what a race decided for, else
    the fastest. ``validation`` says how it was checked, ``provenance`` where and when."""

    key: TuningKey
    config: dict[str, Any]
    measurement: Measurement
    validation: str
    provenance: dict[str, Any]

    @cached_property
    def identity(self) -> tuple[str, ...]:
        """What it is the result of, as text."""
        return self.key.sha256, canonical(self.config)

    @property
    def imported(self) -> str | None:
        """The bundle that it came with; None where it was measured here."""
        name: str | None = self.provenance.get(IMPORTED)
        return name


@dataclass(frozen=True)
class Trial(CacheEntry):
    """Any configuration's, failures included; ``created_at`` is ISO 8601 in UTC."""

    created_at: str
