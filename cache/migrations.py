"""The schema's version: creates it, brings an older one up to date, refuses a newer one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import sqlalchemy as sa
from sqlalchemy import Column, Connection, MetaData, Table, inspect, text, update

from dmuon_tune.errors import CacheError

from .dialect import SCHEMA_LOCK, take_turn
from .models import Base, MetaRow

SCHEMA_VERSION = 4
VERSION_NAME = "schema_version"
VERSION_PATTERN = re.compile(r"[1-9][0-9]{0,8}")


def _add_chains(connection: Connection) -> None:
    """1 → 2: recipes keep what their timed chain says, and every timed chain is kept."""
    for column in (
        "p20_us DOUBLE PRECISION", "p80_us DOUBLE PRECISION", "chunk INTEGER", "picks TEXT DEFAULT '[]' NOT NULL",
        "batch_costs TEXT DEFAULT '[]' NOT NULL",
    ):
        connection.execute(text(f"ALTER TABLE dmuon_recipes ADD COLUMN {column}"))
    metadata = MetaData()  # the table as version 2 has it, whatever today's model says
    Table("dmuon_devices", metadata, Column("id", sa.Integer, primary_key=True))
    chains = Table(
        "dmuon_chains", metadata,
        Column("id", sa.Integer, primary_key=True),
        Column("sha256", sa.String, nullable=False, unique=True),
        Column("device_id", sa.Integer, sa.ForeignKey("dmuon_devices.id"), nullable=False, index=True),
        *(Column(name, sa.String, nullable=False) for name in ("code_digest", "status", "created_at")),
        *(Column(name, sa.Double) for name in ("median_us", "p20_us", "p80_us", "max_rel_err")),
        *(Column(name, sa.Text, nullable=False) for name in ("recipe", "samples", "resources", "log", "provenance")),
    )
    chains.create(connection)


def _add_claims(connection: Connection) -> None:
    """2 → 3: runs that share a cache say what each works on."""
    claims = Table(
        "dmuon_claims", MetaData(),
        Column("unit", sa.String, primary_key=True),
        *(Column(name, sa.String, nullable=False, index=True) for name in ("pool", "claimant")),
        *(Column(name, sa.String, nullable=False) for name in ("host", "process")),
        Column("expires_s", sa.Double, nullable=False),
    )
    claims.create(connection)


def _add_validation(connection: Connection) -> None:
    """3 → 4: how results are checked is a part of their key; of earlier ones it is unknown, which equals nothing."""
    connection.execute(text("ALTER TABLE dmuon_keys ADD COLUMN validation VARCHAR DEFAULT '' NOT NULL"))


MIGRATIONS: Mapping[int, Callable[[Connection], None]] = {  # version → what brings it to the next one
    1: _add_chains,
    2: _add_claims,
    3: _add_validation,
}


class CorruptCacheError(CacheError):
    """The file is not a usable cache whoever reads it: not SQLite, truncated or damaged."""


def prepare(
    connection: Connection,
    where: str,
    version: int = SCHEMA_VERSION,
    migrations: Mapping[int, Callable[[Connection], None]] = MIGRATIONS,
) -> None:
    """Create the schema in an empty database, or migrate an older one, within the caller's write transaction."""
    take_turn(connection, SCHEMA_LOCK)
    found = found_version(connection, where)
    if found is None:
        Base.metadata.create_all(connection)
        connection.execute(MetaRow.__table__.insert().values(name=VERSION_NAME, value=str(version)))  # type: ignore[attr-defined]
        return
    _refuse_newer(found, version, where)
    for step in range(found, version):
        migrations[step](connection)
        connection.execute(update(MetaRow).where(MetaRow.name == VERSION_NAME).values(value=str(step + 1)))


def require_current(connection: Connection, where: str, version: int = SCHEMA_VERSION) -> None:
    """Check, without writing, that this program can read the schema; CacheError says what to do where it cannot."""
    require(found_version(connection, where), connection, where, version)


def require(found: int | None, connection: Connection, where: str, version: int = SCHEMA_VERSION) -> None:
    """The same of a version that was found."""
    if found is None:
        if connection.dialect.name != "sqlite":
            raise CacheError(f"cache {where} is empty; fill it with: dmuon-tune tune --storage URL")
        raise CorruptCacheError(f"cache {where} is empty; delete it, or fill it with: dmuon-tune tune")
    _refuse_newer(found, version, where)
    if found < version:
        raise CacheError(
            f"cache {where} has schema version {found}, version {version} is read here; the next dmuon-tune tune into "
            "it brings it up to date, and a copy that none may write must be made again from that"
        )


def found_version(connection: Connection, where: str) -> int | None:
    """The schema's version, None for an empty database; CorruptCacheError for a damaged cache, CacheError for another
    program's database, which nobody may move."""
    tables = inspect(connection).get_table_names()
    if MetaRow.__tablename__ not in tables:
        if connection.dialect.name != "sqlite":
            return None
        if not Base.metadata.tables.keys().isdisjoint(tables):
            raise CorruptCacheError(f"cache {where} has no table {MetaRow.__tablename__}; delete it and tune again")
        if tables or inspect(connection).get_view_names():
            raise CacheError(f"{where} is some other program's database, not a cache; name another file")
        return None
    value = connection.scalar(text(f"SELECT value FROM {MetaRow.__tablename__} WHERE name = '{VERSION_NAME}'"))
    if not isinstance(value, str) or not VERSION_PATTERN.fullmatch(value):
        raise CorruptCacheError(f"cache {where} has no valid schema version ({value!r}); delete it and tune again")
    return int(value)


def _refuse_newer(found: int, supported: int, where: str) -> None:
    if found > supported:
        raise CacheError(
            f"cache {where} needs schema version {found}, this dmuon-tune supports {supported}; "
            f"upgrade dmuon-tune or name another cache"
        )
