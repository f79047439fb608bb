"""What SQLite and PostgreSQL say differently: upserts, the clock, and a lock that writers take in turn."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Dialect, Double, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

UNIX_EPOCH_JULIAN_DAY = 2440587.5
SECONDS_A_DAY = 86400.0
SCHEMA_LOCK = 0x646D756F6E  # "dmuon": processes that create or migrate the schema on one PostgreSQL server
CLAIMS_LOCK = SCHEMA_LOCK + 1  # processes that change who works on what


def upsert(dialect: Dialect) -> Any:
    """The dialect's ``insert``, which knows ``on_conflict_do_update`` and ``on_conflict_do_nothing``."""
    return postgresql.insert if dialect.name == "postgresql" else sqlite.insert


class now_s(FunctionElement[float]):
    """Seconds since 1970 by the database's clock, one for all who use it, at the moment of the statement."""

    type = Double()
    inherit_cache = True


@compiles(now_s, "postgresql")
def _now_s_of_postgresql(element: now_s, compiler: Any, **options: Any) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)"


@compiles(now_s, "sqlite")
def _now_s_of_sqlite(element: now_s, compiler: Any, **options: Any) -> str:
    return f"((julianday('now') - {UNIX_EPOCH_JULIAN_DAY}) * {SECONDS_A_DAY})"


def take_turn(connection: Connection, lock: int) -> None:
    """Wait until no other transaction holds ``lock``, and hold it to this one's end. SQLite's write transactions, which
    begin with BEGIN IMMEDIATE, take turns anyway."""
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({lock})"))
