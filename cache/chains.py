"""What was timed as a whole chain: its key, its table, and the way between rows and values."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column, relationship

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.measurement import Measurement
from dmuon_tune.recipe import Recipe

from . import sound
from .models import Base, CanonicalJson, DeviceRow, Outcome


@dataclass(frozen=True)
class ChainKey:
    """One way to run one group on one device model: a change in any part is another key.

    ``recipe`` counts without its costs; its picks carry the keys of their kernels' code and toolchains.
    ``code_digest`` is the SHA-256 of what runs the products one after another.
    """

    recipe: Recipe
    code_digest: str
    device: DeviceFingerprint

    def identity(self) -> dict[str, Any]:
        """The recipe without its costs, as JSON types."""
        fields = self.recipe.to_dict()
        return {name: fields[name] for name in ("group", "form", "dtype", "steps", "restarts", "chunk", "picks")}

    @cached_property
    def sha256(self) -> str:
        """Hexadecimal SHA-256 of the key's parts: equal keys give equal text, on every machine."""
        parts = {"recipe": self.identity(), "code_digest": self.code_digest, "device": self.device.limits()}
        return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class ChainTrial:
    """A timed chain's best outcome, failures included. ``max_rel_err`` of the measurement is the relative Frobenius
    distance to the exact polar factor; ``created_at`` is ISO 8601 in UTC."""

    key: ChainKey
    measurement: Measurement
    provenance: dict[str, Any]
    created_at: str

    @property
    def identity(self) -> tuple[str, ...]:
        """What it is the result of, as text."""
        return (self.key.sha256,)

    @property
    def recipe(self) -> Recipe:
        return self.key.recipe

    @property
    def device(self) -> DeviceFingerprint:
        return self.key.device


class ChainRow(Outcome, Base):
    """The best outcome of one chain; times of the whole batch."""

    __tablename__ = "dmuon_chains"

    id: Mapped[int] = mapped_column(primary_key=True)
    sha256: Mapped[str] = mapped_column(unique=True)
    device_id: Mapped[int] = mapped_column(ForeignKey(DeviceRow.id), index=True)
    recipe: Mapped[dict[str, Any]] = mapped_column(CanonicalJson)
    code_digest: Mapped[str]
    provenance: Mapped[dict[str, Any]] = mapped_column(CanonicalJson)
    created_at: Mapped[str]

    device: Mapped[DeviceRow] = relationship(lazy="joined", innerjoin=True)

    def value(self) -> ChainTrial:
        recipe = sound.recipe({"batch_costs": [], **sound.mapping(self.recipe, "a recipe")})
        key = ChainKey(recipe, self.code_digest, self.device.value())
        provenance = sound.mapping(self.provenance, "a provenance")
        return ChainTrial(key, self.measurement(), provenance, self.created_at)
