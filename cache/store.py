"""Store: one cache, written one result a transaction and read by key, problem and device."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from logging import getLogger
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Engine,
    Select,
    Text,
    and_,
    delete,
    func,
    not_,
    or_,
    select,
    type_coerce,
)
from sqlalchemy.orm import Session

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.errors import CacheError, UsageError
from dmuon_tune.measurement import Measurement, best_of
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, Recipe

from .chains import ChainKey, ChainRow, ChainTrial
from .database import (
    LockedCacheError,
    describe,
    folder_lock,
    locate,
    make_folder,
    open_engine,
    readable,
    rest,
    run_alone,
    set_aside,
    translated_errors,
    use_wal,
)
from .dialect import upsert
from .key import TuningKey
from .lookup import entries_sql, entry_of, recipe_of, recipe_sql
from .migrations import CorruptCacheError, prepare
from .models import IMPORTED, DeviceRow, KernelRow, KeyRow, ProblemRow, RecipeRow, ToolchainRow, TrialRow, WinnerRow
from .paths import CACHE_DIR_VARIABLE, user_cache_path

logger = getLogger("dmuon_tune.cache")


@dataclass(frozen=True)
class CacheEntry:
    """A key's best correct configuration: what a race decided for, else the fastest. ``validation`` says how it was
    checked, ``provenance`` where and when."""

    key: TuningKey
    config: dict[str, Any]
    measurement: Measurement
    validation: str
    provenance: dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """The best outcome of one configuration, failures included; ``created_at`` is ISO 8601 in UTC."""

    key_sha256: str
    config: dict[str, Any]
    measurement: Measurement
    created_at: str


class Store:
    """One cache: an SQLite file, a database in memory (``sqlite://``) or a server's URL. Every error is a CacheError.

    Results are durable when ``record`` returns, whatever happens to the process afterwards.
    """

    def __init__(self, engine: Engine, location: Path | URL | None, read_only: bool) -> None:
        self._engine = engine
        self._location = location
        self.where = describe(location)
        self.read_only = read_only
        self._upsert = upsert(engine.dialect)

    @property
    def is_server(self) -> bool:
        return isinstance(self._location, URL)

    @property
    def is_private(self) -> bool:
        """Whether no other process can see it: a database in memory."""
        return self._location is None

    @classmethod
    def open(cls, path_or_url: str | Path, read_only: bool = False, shipped: bool = False) -> Store:
        """Open a cache; for writing it is created, or migrated to this schema, where need be.

        ``shipped`` says that nobody writes a file that is opened read-only. Raises CacheError for a file that is not
        a cache, is damaged, of a newer schema or locked, cannot be written, or (read-only) does not exist.
        """
        location = locate(path_or_url)
        if isinstance(location, Path) and os.path.isdir(location):
            raise CacheError(f"cache {location} is a folder; name a file in it")
        with translated_errors(describe(location)):
            store = cls(open_engine(location, read_only, shipped), location, read_only)
        try:
            store._check_schema()
        except BaseException:
            store._engine.dispose()
            raise
        return store

    def _check_schema(self) -> None:
        with translated_errors(self.where):
            if self.read_only:
                self._engine = readable(self._engine, self.where)
                return
            with self._engine.execution_options(writes=True).begin() as connection:
                prepare(connection, self.where)
        if isinstance(self._location, Path):
            use_wal(self._engine, self.where)

    @classmethod
    def open_user(cls, path: str | Path | None = None, environ: Mapping[str, str] = os.environ) -> Store:
        """Open the cache to tune into: ``path``, or the user's cache.

        The user's cache (:func:`user_cache_path`) is set aside where it is corrupt, with one warning, and an empty one
        begun. Any other corrupt file, another program's database, a newer schema, a lock or an unwritable folder is a
        CacheError: nothing is lost or moved then.
        """
        location = locate(path if path is not None else user_cache_path(environ))
        if not isinstance(location, Path):
            return cls.open(location.render_as_string(False) if location else "sqlite://")
        make_folder(location.parent)
        with folder_lock(location.parent):  # else the second process to find it corrupt moves the first one's new file
            try:
                store = cls.open(location)
                store._check_pages()
                return store
            except CorruptCacheError as error:
                if location != user_cache_path(environ):
                    raise
                aside = set_aside(location)
                logger.warning("%s; set aside as %s, starting an empty cache", str(error).split(";")[0], aside.name)
            return cls.open(location)

    def _check_pages(self) -> None:
        try:
            self.check("quick_check")
        except CorruptCacheError:
            self.close()
            raise

    def check(self, how: str = "integrity_check") -> None:
        """CacheError where a file's pages, or (by ``quick_check`` not) its indices and rows, do not belong together."""
        if self.is_server:
            return
        with translated_errors(self.where), self._engine.connect() as connection:
            verdict = connection.exec_driver_sql(f"PRAGMA {how}(1)").scalar()
        if verdict != "ok":
            raise CorruptCacheError(f"cache {self.where} is damaged; delete it and tune again")

    def compact(self) -> None:
        """Give the space of deleted rows back, where others do not use the file."""
        if not self.is_server:
            with suppress(LockedCacheError), translated_errors(self.where):
                run_alone(self._engine, "VACUUM")

    def close(self) -> None:
        self._engine.dispose()
        if isinstance(self._location, Path) and not self.read_only:
            rest(self._engine)
            self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _reading(self) -> Iterator[Session]:
        with translated_errors(self.where), Session(self._engine) as session, self._damage_told():
            yield session

    @contextmanager
    def _looking_up(self) -> Iterator[Connection]:
        """As :meth:`_reading`, for one statement: without a transaction around it."""
        with translated_errors(self.where), self._engine.connect() as connection, self._damage_told():
            yield connection.execution_options(alone=True)

    @contextmanager
    def _damage_told(self) -> Iterator[None]:
        """For what turns rows into values."""
        try:
            yield
        except (ValueError, TypeError, AttributeError, LookupError, UsageError) as error:
            reason = (str(error) or repr(error)).splitlines()[0]
            raise CorruptCacheError(
                f"cache {self.where} holds a damaged row ({reason}); delete it and tune again"
            ) from error

    @contextmanager
    def _writing(self) -> Iterator[Session]:
        if self.read_only:
            raise CacheError(
                f"cache {self.where} is opened read-only; set {CACHE_DIR_VARIABLE} to a writable folder and tune there"
            )
        with translated_errors(self.where), Session(self._engine.execution_options(writes=True)) as session:
            with session.begin():
                yield session

    def record(
        self,
        key: TuningKey,
        config: dict[str, Any],
        measurement: Measurement,
        provenance: dict[str, Any],
        validation: str = "",
    ) -> None:
        """Keep one result, in one transaction. Of two results of one configuration the better one stays.

        Ok beats a failure, undisturbed beats disturbed and faster beats slower; of two failures the first stays, and a
        race's result until the next race. ``validation`` says how an ok result was checked; left out, it is
        ``provenance["validation"]`` where there is one.
        """
        values = {
            **measurement_columns(measurement),
            "validation": validation or str(provenance.get("validation", "")),
            "provenance": provenance,
            "created_at": _now(),
        }
        with self._writing() as session:
            key_id = self._locked_key_id(session, key)
            insert = self._upsert(TrialRow).values(key_id=key_id, config=config, **values)
            is_better = _is_better(insert.excluded, TrialRow)
            unique = ["key_id", "config"]
            session.execute(insert.on_conflict_do_update(index_elements=unique, set_=values, where=is_better))
            if measurement.ok:
                self._crown(session, key_id)

    def record_race(
        self, results: Sequence[tuple[TuningKey, dict[str, Any], Measurement]], provenance: dict[str, Any]
    ) -> None:
        """Keep how one problem's finalists ended, in one transaction, in place of what was known of them: ok results
        with their ``race`` in the resources, or failures. When they were first tried stays as it was."""
        with self._writing() as session:
            for key, config, measurement in sorted(results, key=lambda result: result[0].sha256):
                key_id = self._locked_key_id(session, key)
                values = {**measurement_columns(measurement), "provenance": provenance}
                values["validation"] = str(provenance.get("validation", "")) if measurement.ok else ""
                insert = self._upsert(TrialRow).values(key_id=key_id, config=config, created_at=_now(), **values)
                session.execute(insert.on_conflict_do_update(index_elements=["key_id", "config"], set_=values))
                self._crown(session, key_id)

    def _crown(self, session: Session, key_id: int) -> None:
        """Let the key's winner be what its last race decided for, else the fastest."""
        rows = session.scalars(
            select(TrialRow).where(TrialRow.key_id == key_id, TrialRow.status == "ok").order_by(TrialRow.id)
        ).all()
        if not rows:
            session.execute(delete(WinnerRow).where(WinnerRow.key_id == key_id))
            return
        best = rows[best_of([row.measurement() for row in rows])]
        values = {"trial_id": best.id, "median_us": best.median_us}
        insert = self._upsert(WinnerRow).values(key_id=key_id, **values)
        session.execute(insert.on_conflict_do_update(index_elements=["key_id"], set_=values))

    def _locked_key_id(self, session: Session, key: TuningKey) -> int:
        """One writer of a key at a time, from before its trials on: else each of two would miss the other's result."""
        key_id = self._key_id(session, key)
        session.execute(select(KeyRow.id).where(KeyRow.id == key_id).with_for_update())
        return key_id

    def _key_id(self, session: Session, key: TuningKey) -> int:
        found = session.scalar(select(KeyRow.id).where(KeyRow.sha256 == key.sha256))
        if found is not None:
            return found
        parts = {
            "problem_id": self._id_of(session, ProblemRow, key.problem.to_dict()),
            "kernel_id": self._id_of(session, KernelRow, {"name": key.kernel, "spec_digest": key.spec_digest}),
            "device_id": self._id_of(session, DeviceRow, key.device.to_dict()),
            "toolchain_id": self._id_of(session, ToolchainRow, key.toolchain.to_dict()),
            "validation": key.validation,
        }
        session.execute(self._upsert(KeyRow).values(sha256=key.sha256, **parts).on_conflict_do_nothing())
        return session.scalars(select(KeyRow.id).where(KeyRow.sha256 == key.sha256)).one()

    def _id_of(self, session: Session, row: Any, values: dict[str, Any]) -> int:
        session.execute(self._upsert(row).values(**values).on_conflict_do_nothing())
        identity = {name: values[name] for name in row.IDENTITY}
        return int(session.scalars(select(row.id).filter_by(**identity)).one())

    def trials(self, key: TuningKey) -> list[Trial]:
        """Everything that was tried for a key, in the order of its first recording."""
        with self._reading() as session:
            rows = session.scalars(
                select(TrialRow).join(TrialRow.key).where(KeyRow.sha256 == key.sha256).order_by(TrialRow.id)
            )
            return [_trial(row) for row in rows]

    def all_trials(self) -> list[tuple[TuningKey, Trial]]:
        """Everything that was tried, in the order of its first recording."""
        with self._reading() as session:
            rows = session.scalars(select(TrialRow).order_by(TrialRow.id))
            return [(row.key.value(), _trial(row)) for row in rows]

    def best(self, key: TuningKey) -> CacheEntry | None:
        """The best ok configuration of a key, None where there is none yet."""
        with self._reading() as session:
            row = session.scalar(_winners().where(KeyRow.sha256 == key.sha256))
            return None if row is None else _entry(row)

    def was_measured_here(self, key_sha256: str, config: Mapping[str, Any]) -> bool:
        """Whether this cache holds an ok result of this configuration that did not come with a bundle."""
        statement = select(TrialRow.provenance).join(KeyRow, TrialRow.key_id == KeyRow.id)
        statement = statement.where(
            KeyRow.sha256 == key_sha256, TrialRow.config == dict(config), TrialRow.status == "ok"
        )
        with self._reading() as session:
            provenance = session.scalar(statement)
            return provenance is not None and IMPORTED not in provenance

    def entries(self, problem: Problem | None = None, device: DeviceFingerprint | None = None) -> list[CacheEntry]:
        """The best ok entry of every key of a problem (all without one) on a device model, fastest first."""
        statement = entries_sql(problem is not None, device is not None)
        wanted = {**(problem.to_dict() if problem else {}), **(device.limits() if device else {})}
        with self._looking_up() as connection:
            return [CacheEntry(*_sound(entry_of(row))) for row in connection.execute(statement, wanted)]

    def put_recipe(self, device: DeviceFingerprint, recipe: Recipe) -> None:
        """Keep a recipe for its group and dtype on a device model, in place of the one there was."""
        group = recipe.group
        fields = recipe.to_dict()
        values = {**{name: fields[name] for name in RecipeRow.FIELDS}, "created_at": _now()}
        with self._writing() as session:
            device_id = self._id_of(session, DeviceRow, device.to_dict())
            insert = self._upsert(RecipeRow).values(
                device_id=device_id, batch=group.batch, rows=group.rows, cols=group.cols, **values
            )
            session.execute(insert.on_conflict_do_update(index_elements=list(RecipeRow.IDENTITY), set_=values))

    def recipe(self, device: DeviceFingerprint, group: Group, dtype: str) -> Recipe | None:
        """The recipe of a group in a dtype on a device model, None where there is none."""
        of = {"batch": group.batch, "rows": group.rows, "cols": group.cols}
        with self._looking_up() as connection:
            row = connection.execute(recipe_sql(), {**of, "dtype": dtype, **device.limits()}).first()
            return None if row is None else recipe_of(row, of)

    def recipes(self, device: DeviceFingerprint | None = None) -> list[Recipe]:
        """Every recipe, or those of one device model, in the order of their first keeping."""
        statement = select(RecipeRow).order_by(RecipeRow.id)
        if device is not None:
            statement = statement.where(RecipeRow.device_id.in_(_device_ids(device)))
        with self._reading() as session:
            return [row.value() for row in session.scalars(statement)]

    def record_chain(self, key: ChainKey, measurement: Measurement, provenance: dict[str, Any]) -> None:
        """Keep one chain's result, in one transaction; of two results of one chain the better one stays, as in
        :meth:`record`."""
        values = {**measurement_columns(measurement), "provenance": provenance, "created_at": _now()}
        with self._writing() as session:
            insert = self._upsert(ChainRow).values(
                sha256=key.sha256, device_id=self._id_of(session, DeviceRow, key.device.to_dict()),
                recipe=key.identity(), code_digest=key.code_digest, **values,
            )
            is_better = _is_better(insert.excluded, ChainRow)
            session.execute(insert.on_conflict_do_update(index_elements=["sha256"], set_=values, where=is_better))

    def chain_trial(self, key: ChainKey) -> ChainTrial | None:
        """What is known of one chain."""
        with self._reading() as session:
            row = session.scalar(select(ChainRow).where(ChainRow.sha256 == key.sha256))
            return None if row is None else row.value()

    def chain_trials(self, device: DeviceFingerprint | None = None) -> list[ChainTrial]:
        """Every chain that was timed, or tried to be, on one device model or any, in the order of first recording."""
        statement = select(ChainRow).order_by(ChainRow.id)
        if device is not None:
            statement = statement.where(ChainRow.device_id.in_(_device_ids(device)))
        with self._reading() as session:
            return [row.value() for row in session.scalars(statement)]

    def counts(self) -> dict[str, int]:
        """How many trials ended in each status; a status that never occurred is left out."""
        with self._reading() as session:
            rows = session.execute(
                select(TrialRow.status, func.count()).group_by(TrialRow.status).order_by(TrialRow.status)
            )
            return {status: count for status, count in rows}


def _is_better(new: Any, kept: Any) -> ColumnElement[bool]:
    def says(row: Any, name: str) -> ColumnElement[bool]:
        return type_coerce(row.resources, Text).contains(f'"{name}":')  # only what is true, and canonical text

    cleaner = and_(says(kept, "contended"), not_(says(new, "contended")))
    as_clean = or_(says(kept, "contended"), not_(says(new, "contended")))
    better = or_(cleaner, and_(as_clean, new.median_us < kept.median_us))
    return and_(new.status == "ok", or_(kept.status != "ok", and_(not_(says(kept, "race")), better)))


def _winners() -> Select[TrialRow]:
    return select(TrialRow).join(WinnerRow, WinnerRow.trial_id == TrialRow.id).join(TrialRow.key)


def _device_ids(device: DeviceFingerprint) -> Select[int]:
    return select(DeviceRow.id).filter_by(**device.limits())


def _trial(row: TrialRow) -> Trial:
    return Trial(row.key.sha256, config_of(row), row.measurement(), row.created_at)


def _entry(row: TrialRow) -> CacheEntry:
    return CacheEntry(row.key.value(), config_of(row), row.measurement(), row.validation, row.provenance)


def _sound(entry: tuple[TuningKey, dict[str, Any], Measurement, str, dict[str, Any]]) -> tuple[Any, ...]:
    if not isinstance(entry[1], dict):
        raise ValueError(f"a configuration is no {type(entry[1]).__name__}")
    return entry


def config_of(row: TrialRow) -> dict[str, Any]:
    """ValueError for what is no configuration."""
    if not isinstance(row.config, dict):
        raise ValueError(f"a configuration is no {type(row.config).__name__}")
    return row.config


def measurement_columns(measurement: Measurement) -> dict[str, Any]:
    """A measurement as the columns of :class:`.models.Outcome`."""
    error = measurement.max_rel_err
    return {
        **measurement.to_dict(),
        "samples": list(measurement.samples),
        "max_rel_err": math.inf if error is not None and math.isnan(error) else error,  # SQLite keeps NaN as NULL
        "log": measurement.log.replace("\0", "").encode(errors="replace").decode(),
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
