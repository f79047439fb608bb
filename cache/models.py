"""The cache's tables as typed SQLAlchemy models, with the way from each row to the value it keeps."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import BigInteger, Dialect, ForeignKey, Index, Text, TypeDecorator, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from dmuon_tune.device import DeviceFingerprint, Toolchain
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Recipe

from . import sound
from .key import TuningKey

IMPORTED = "imported"  # in a result's provenance: the bundle that it came with; one measured here has none


def canonical(value: Any) -> str:
    """Equal values give equal JSON text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


class CanonicalJson(TypeDecorator[Any]):
    """JSON as canonical text: equal values are equal text, so it may take part in a unique constraint."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else canonical(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


class Base(DeclarativeBase):
    """Tables are prefixed: a database server's schema may hold Optuna's tables as well."""


class MetaRow(Base):
    """Facts about the file itself: ``schema_version``."""

    __tablename__ = "dmuon_meta"

    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]


class ProblemRow(Base):
    __tablename__ = "dmuon_problems"
    IDENTITY = ("op", "batch", "m", "n", "k", "dtype", "out_dtype", "layout", "epilogue")
    __table_args__ = (UniqueConstraint(*IDENTITY),)

    id: Mapped[int] = mapped_column(primary_key=True)
    op: Mapped[str]
    batch: Mapped[int]
    m: Mapped[int]
    n: Mapped[int]
    k: Mapped[int]
    dtype: Mapped[str]
    out_dtype: Mapped[str]
    layout: Mapped[str]
    epilogue: Mapped[str]

    def value(self) -> Problem:
        return Problem(**{name: getattr(self, name) for name in self.IDENTITY})


class KernelRow(Base):
    __tablename__ = "dmuon_kernels"
    IDENTITY = ("name", "spec_digest")
    __table_args__ = (UniqueConstraint(*IDENTITY),)

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    spec_digest: Mapped[str]


class DeviceRow(Base):
    """A device model is its limits; ``name`` is the product name under which it was first seen."""

    __tablename__ = "dmuon_devices"
    IDENTITY = ("arch", "sm_count", "smem_per_block_bytes", "l2_bytes", "memory_bytes")
    __table_args__ = (UniqueConstraint(*IDENTITY),)

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    arch: Mapped[str]
    sm_count: Mapped[int]
    smem_per_block_bytes: Mapped[int] = mapped_column(BigInteger)
    l2_bytes: Mapped[int] = mapped_column(BigInteger)
    memory_bytes: Mapped[int] = mapped_column(BigInteger)

    def value(self) -> DeviceFingerprint:
        return DeviceFingerprint(self.name, **{name: getattr(self, name) for name in self.IDENTITY})


class ToolchainRow(Base):
    __tablename__ = "dmuon_toolchains"
    IDENTITY = ("backend", "versions")
    __table_args__ = (UniqueConstraint(*IDENTITY),)

    id: Mapped[int] = mapped_column(primary_key=True)
    backend: Mapped[str]
    versions: Mapped[dict[str, str]] = mapped_column(CanonicalJson)

    def value(self) -> Toolchain:
        return Toolchain.from_dict({"backend": self.backend, "versions": self.versions})


class KeyRow(Base):
    __tablename__ = "dmuon_keys"

    id: Mapped[int] = mapped_column(primary_key=True)
    sha256: Mapped[str] = mapped_column(unique=True)
    problem_id: Mapped[int] = mapped_column(ForeignKey(ProblemRow.id), index=True)
    kernel_id: Mapped[int] = mapped_column(ForeignKey(KernelRow.id))
    device_id: Mapped[int] = mapped_column(ForeignKey(DeviceRow.id), index=True)
    toolchain_id: Mapped[int] = mapped_column(ForeignKey(ToolchainRow.id))
    validation: Mapped[str] = mapped_column(server_default="")

    problem: Mapped[ProblemRow] = relationship(lazy="joined", innerjoin=True)
    kernel: Mapped[KernelRow] = relationship(lazy="joined", innerjoin=True)
    device: Mapped[DeviceRow] = relationship(lazy="joined", innerjoin=True)
    toolchain: Mapped[ToolchainRow] = relationship(lazy="joined", innerjoin=True)

    def value(self) -> TuningKey:
        return TuningKey(
            self.problem.value(),
            self.kernel.name,
            self.kernel.spec_digest,
            self.device.value(),
            self.toolchain.value(),
            self.validation,
        )


class Outcome:
    """The columns of a measurement; times in microseconds, only with status ok."""

    status: Mapped[str]
    median_us: Mapped[float | None]
    p20_us: Mapped[float | None]
    p80_us: Mapped[float | None]
    samples: Mapped[list[float]] = mapped_column(CanonicalJson)
    max_rel_err: Mapped[float | None]
    resources: Mapped[dict[str, Any]] = mapped_column(CanonicalJson)
    log: Mapped[str] = mapped_column(Text)

    def measurement(self) -> Measurement:
        times = (self.median_us, self.p20_us, self.p80_us)
        return sound.measurement(self.status, *times, self.samples, self.max_rel_err, self.resources, self.log)


class TrialRow(Outcome, Base):
    """The best outcome of one configuration for one key; times of one call."""

    __tablename__ = "dmuon_trials"
    __table_args__ = (UniqueConstraint("key_id", "config"), Index("dmuon_trials_status", "status"))

    id: Mapped[int] = mapped_column(primary_key=True)
    key_id: Mapped[int] = mapped_column(ForeignKey(KeyRow.id))
    config: Mapped[dict[str, Any]] = mapped_column(CanonicalJson)
    validation: Mapped[str]
    provenance: Mapped[dict[str, Any]] = mapped_column(CanonicalJson)
    created_at: Mapped[str]

    key: Mapped[KeyRow] = relationship(lazy="joined", innerjoin=True)


class WinnerRow(Base):
    """The best ok trial of a key."""

    __tablename__ = "dmuon_winners"

    key_id: Mapped[int] = mapped_column(ForeignKey(KeyRow.id), primary_key=True)
    trial_id: Mapped[int] = mapped_column(ForeignKey(TrialRow.id))
    median_us: Mapped[float]


class RecipeRow(Base):
    """How a group is orthogonalized in one dtype on one device model; ``cost_us`` for the whole batch."""

    __tablename__ = "dmuon_recipes"
    IDENTITY = ("device_id", "batch", "rows", "cols", "dtype")
    FIELDS = (
        "form", "dtype", "steps", "restarts", "cost_us", "p20_us", "p80_us", "chunk", "picks", "batch_costs",
    )
    __table_args__ = (UniqueConstraint(*IDENTITY),)

    id: Mapped[int] = mapped_column(primary_key=True)
    device_id: Mapped[int] = mapped_column(ForeignKey(DeviceRow.id))
    batch: Mapped[int]
    rows: Mapped[int]
    cols: Mapped[int]
    dtype: Mapped[str]
    form: Mapped[str]
    steps: Mapped[int]
    restarts: Mapped[list[int]] = mapped_column(CanonicalJson)
    cost_us: Mapped[float | None]
    p20_us: Mapped[float | None]
    p80_us: Mapped[float | None]
    chunk: Mapped[int | None]
    picks: Mapped[list[dict[str, Any]]] = mapped_column(CanonicalJson, server_default="[]")
    batch_costs: Mapped[list[tuple[int, float]]] = mapped_column(CanonicalJson, server_default="[]")
    created_at: Mapped[str]

    def value(self) -> Recipe:
        group = {"batch": self.batch, "rows": self.rows, "cols": self.cols}
        return sound.recipe({"group": group, **{name: getattr(self, name) for name in self.FIELDS}})
