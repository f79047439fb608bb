"""Store: one cache, written one result a transaction and read by key, problem and device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Select, delete, func, select
from sqlalchemy.orm import Session

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.measurement import Measurement, best_of
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, Recipe

from .chains import ChainKey, ChainRow, ChainTrial
from .key import TuningKey
from .lookup import entries_sql, entry_of, recipe_of, recipe_sql
from .models import IMPORTED, DeviceRow, KeyRow, RecipeRow, TrialRow, WinnerRow
from .opened import OpenedCache
from .results import CacheEntry, Trial
from .rows import (
    chain_columns,
    entry_of_row,
    is_better,
    key_columns,
    measurement_columns,
    now,
    recipe_columns,
    trial_of,
)


class Store(OpenedCache):
    """One cache: an SQLite file, a database in memory (``sqlite://``) or a server's URL. Every error is a CacheError.

    Results are durable when ``record`` returns, whatever happens to the process afterwards.
    """

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
            "created_at": now(),
        }
        with self._writing() as session:
            key_id = self._locked_key_id(session, key)
            insert = self._upsert(TrialRow).values(key_id=key_id, config=config, **values)
            better = is_better(insert.excluded, TrialRow)
            unique = ["key_id", "config"]
            session.execute(insert.on_conflict_do_update(index_elements=unique, set_=values, where=better))
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
                insert = self._upsert(TrialRow).values(key_id=key_id, config=config, created_at=now(), **values)
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
        with self._damage_told():
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
        columns = key_columns(key, lambda row, values: self._id_of(session, row, values))
        session.execute(self._upsert(KeyRow).values(**columns).on_conflict_do_nothing())
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
            return [trial_of(row, key) for row in rows]

    def all_trials(self) -> list[Trial]:
        """Everything that was tried, in the order of its first recording."""
        with self._reading() as session:
            rows = session.scalars(select(TrialRow).order_by(TrialRow.id))
            return [trial_of(row, row.key.value()) for row in rows]

    def best(self, key: TuningKey) -> CacheEntry | None:
        """The best ok configuration of a key, None where there is none yet."""
        with self._reading() as session:
            row = session.scalar(_winners().where(KeyRow.sha256 == key.sha256))
            return None if row is None else entry_of_row(row)

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
            return [entry_of(row) for row in connection.execute(statement, wanted)]

    def put_recipe(self, device: DeviceFingerprint, recipe: Recipe) -> None:
        """Keep a recipe for its group and dtype on a device model, in place of the one there was."""
        columns = {**recipe_columns(recipe), "created_at": now()}
        with self._writing() as session:
            device_id = self._id_of(session, DeviceRow, device.to_dict())
            insert = self._upsert(RecipeRow).values(device_id=device_id, **columns)
            session.execute(insert.on_conflict_do_update(index_elements=list(RecipeRow.IDENTITY), set_=columns))

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
        values = {**measurement_columns(measurement), "provenance": provenance, "created_at": now()}
        with self._writing() as session:
            columns = chain_columns(key, lambda row, values: self._id_of(session, row, values))
            insert = self._upsert(ChainRow).values(**columns, **values)
            better = is_better(insert.excluded, ChainRow)
            session.execute(insert.on_conflict_do_update(index_elements=["sha256"], set_=values, where=better))

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


def _winners() -> Select[TrialRow]:
    return select(TrialRow).join(WinnerRow, WinnerRow.trial_id == TrialRow.id).join(TrialRow.key)


def _device_ids(device: DeviceFingerprint) -> Select[int]:
    return select(DeviceRow.id).filter_by(**device.limits())
