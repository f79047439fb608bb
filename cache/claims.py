"""Claims: which run works on what, kept beside the results, so that runs which share a cache divide the work."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Mapped, Session, mapped_column

from dmuon_tune.errors import UsageError

from .dialect import CLAIMS_LOCK, now_s, take_turn
from .models import Base
from .store import Store

LEASE_VARIABLE = "DMUON_TUNE_CLAIM_S"
DEFAULT_LEASE_S = 60.0
RUN = "run "  # a unit that begins so says that its claimant is at work, whatever else it holds


class ClaimRow(Base):
    """``unit`` is taken by ``claimant`` until ``expires_s`` by the database's clock, unless it renews it before.

    Runs of one ``pool``, a device model, divide its units. ``process`` tells runs on the same machine whether the
    claimant still lives.
    """

    __tablename__ = "dmuon_claims"

    unit: Mapped[str] = mapped_column(primary_key=True)
    pool: Mapped[str] = mapped_column(index=True)
    claimant: Mapped[str] = mapped_column(index=True)
    host: Mapped[str]
    process: Mapped[str]
    expires_s: Mapped[float]


@dataclass(frozen=True)
class Rivals:
    """The other runs of a pool: how many there are, and what they hold (unit → host)."""

    runs: int
    held: Mapping[str, str]


def lease_s() -> float:
    """How long a claim lasts that its claimant no longer renews, seconds: ``DMUON_TUNE_CLAIM_S``."""
    text = os.environ.get(LEASE_VARIABLE) or str(DEFAULT_LEASE_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise UsageError(f"{LEASE_VARIABLE} must be seconds, more than 0, not {text!r}")
    return seconds


class Claims:
    """One run's claims in a store that others may use too. Every change is one transaction, and changes take turns.

    A claim ends when it is released, when it was not renewed for ``lease_s`` seconds by the database's clock, or, on
    the claimant's own machine, when its process is gone. Raises CacheError as the store does.
    """

    def __init__(self, store: Store, pool: str, host: str | None = None, process: str | None = None) -> None:
        self._store, self._pool = store, pool
        self.lease_s = lease_s()
        self._mine = {
            "pool": pool,
            "claimant": uuid.uuid4().hex,
            "host": socket.gethostname() if host is None else host,
            "process": this_process() if process is None else process,
        }
        self._claimant = self._mine["claimant"]

    def take(self, wanted: Sequence[Sequence[str]]) -> list[bool]:
        """For each of these sets of units whether it is this run's now: a set is taken whole or not at all."""
        with self._changing() as session:
            others = (ClaimRow.pool == self._pool, ClaimRow.claimant != self._claimant)
            foreign = set(session.scalars(select(ClaimRow.unit).where(*others)))
            taken = [foreign.isdisjoint(units) for units in wanted]
            granted = [units for units, is_free in zip(wanted, taken, strict=True) if is_free]
            self._insert(session, (unit for units in granted for unit in units))
            return taken

    def release(self, units: Iterable[str]) -> None:
        """Let others have these units; those that are not this run's stay as they are."""
        with self._changing() as session:
            mine = (ClaimRow.claimant == self._claimant, ClaimRow.unit.in_(list(units)))
            session.execute(delete(ClaimRow).where(*mine))

    def renew(self) -> set[str]:
        """Extend this run's claims; returns the units that it still holds."""
        with self._changing() as session:
            mine = ClaimRow.claimant == self._claimant
            session.execute(update(ClaimRow).where(mine).values(expires_s=now_s() + self.lease_s))
            self._insert(session, [])
            return {unit for unit in session.scalars(select(ClaimRow.unit).where(mine)) if not unit.startswith(RUN)}

    def leave(self) -> None:
        """Release everything: this run is over."""
        with self._changing() as session:
            session.execute(delete(ClaimRow).where(ClaimRow.claimant == self._claimant))

    def rivals(self) -> Rivals:
        """The other runs of this pool that are alive. Only reads."""
        alive = (ClaimRow.pool == self._pool, ClaimRow.claimant != self._claimant, ClaimRow.expires_s > now_s())
        with self._store._reading() as session:
            rows = [row for row in session.scalars(select(ClaimRow).where(*alive)) if not is_gone(row.process)]
        runs = sum(row.unit.startswith(RUN) for row in rows)
        return Rivals(runs, {row.unit: row.host for row in rows if not row.unit.startswith(RUN)})

    def _insert(self, session: Session, units: Iterable[str]) -> None:
        """Keep units as this run's, and that it is at work."""
        insert = self._store._upsert(ClaimRow.__table__).values(expires_s=now_s() + self.lease_s)
        rows = [{"unit": unit, **self._mine} for unit in (RUN + self._claimant, *units)]
        session.connection().execute(insert.on_conflict_do_nothing(), rows)

    @contextmanager
    def _changing(self) -> Iterator[Session]:
        """A transaction that no other change of claims overlaps, without the claims of the dead."""
        with self._store._writing() as session:
            take_turn(session.connection(), CLAIMS_LOCK)
            session.execute(delete(ClaimRow).where(ClaimRow.expires_s <= now_s()))
            others = select(ClaimRow.claimant, ClaimRow.process).where(ClaimRow.unit.startswith(RUN))
            gone = [claimant for claimant, process in session.execute(others) if is_gone(process)]
            if gone:
                session.execute(delete(ClaimRow).where(ClaimRow.claimant.in_(gone)))
            yield session


def this_process() -> str:
    """Names this process among those that may look into each other's state: the same boot, namespace and user. Empty
    where the system has no ``/proc``."""
    place, started = _place(), _start_time(os.getpid())
    return f"{place} {os.getpid()} {started}" if place and started else ""


def is_gone(process: str) -> bool:
    """Whether a process of :func:`this_process` has certainly ended; never where it ran out of this one's sight."""
    place, _, rest = process.rpartition(" ")[0].rpartition(" ")
    return bool(place) and place == _place() and _start_time(int(rest)) != process.rpartition(" ")[2]


def _place() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """When a process began, in clock ticks since boot; empty where it does not exist or has ended unwaited-for."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()  # proc(5): state is field 3, starttime field 22
