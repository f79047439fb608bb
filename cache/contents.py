"""Contents: all that a cache holds as plain values, and the way back into a store, in one transaction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session, lazyload

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.measurement import best_of
from dmuon_tune.recipe import Recipe

from .artefacts import artefact_id
from .chains import ChainRow, ChainTrial
from .key import TuningKey
from .models import (
    IMPORTED,
    Base,
    DeviceRow,
    KernelRow,
    KeyRow,
    ProblemRow,
    RecipeRow,
    ToolchainRow,
    TrialRow,
    WinnerRow,
    canonical,
)
from .results import Trial
from .rows import chain_columns, key_columns, measurement_columns, recipe_columns, trial_of
from .store import Store

EPOCH = "1970-01-01T00:00:00.000+00:00"
ROWS_AT_ONCE = 500  # of a statement's parameters, which databases limit
DATA_TABLES = (WinnerRow, TrialRow, KeyRow, RecipeRow, ChainRow, ProblemRow, KernelRow, ToolchainRow, DeviceRow)


@dataclass(frozen=True)
class KeptRecipe:
    """A group's recipe on one device model."""

    device: DeviceFingerprint
    recipe: Recipe
    created_at: str

    @cached_property
    def identity(self) -> tuple[str, ...]:
        return canonical(self.device.limits()), self.recipe.group.label(), self.recipe.dtype


@dataclass(frozen=True)
class Contents:
    """All that a cache holds but for what runs have claimed."""

    results: tuple[Trial, ...] = ()
    recipes: tuple[KeptRecipe, ...] = ()
    chains: tuple[ChainTrial, ...] = ()

    @cached_property
    def artefact_ids(self) -> frozenset[str]:
        """What compiled code of these results is named by."""
        return frozenset(artefact_id(result.key.sha256, result.config) for result in self.results)

    @cached_property
    def winners(self) -> tuple[Trial, ...]:
        """Each key's best ok result, in the results' order."""
        by_key: dict[str, list[Trial]] = defaultdict(list)
        for result in self.results:
            if result.measurement.ok:
                by_key[result.key.sha256].append(result)
        return tuple(ok[best_of([result.measurement for result in ok])] for ok in by_key.values())

    def only_winners(self) -> Contents:
        """What training reads: each key's best result, what recipes name besides, and the recipes."""
        named = {
            (pick.key, canonical(pick.config)) for kept in self.recipes for pick in kept.recipe.picks
        } | {winner.identity for winner in self.winners}
        return Contents(
            tuple(result for result in self.results if result.measurement.ok and result.identity in named), self.recipes
        )

    def as_shipped(self) -> Contents:
        """In an order that the contents alone decide, without what says where a cache got them from: a result's time is
        the one in its provenance."""
        results = [replace(result, provenance=_shipped(result.provenance)) for result in self.results]
        chains = [replace(chain, provenance=_shipped(chain.provenance)) for chain in self.chains]
        return Contents(
            tuple(sorted((replace(each, created_at=_date(each)) for each in results), key=lambda each: each.identity)),
            tuple(sorted((replace(each, created_at=EPOCH) for each in self.recipes), key=lambda each: each.identity)),
            tuple(sorted((replace(each, created_at=_date(each)) for each in chains), key=lambda each: each.identity)),
        )

    def as_imported(self, name: str) -> Contents:
        """Marked as not measured here."""
        results = (replace(result, provenance={**result.provenance, IMPORTED: name}) for result in self.results)
        return replace(self, results=tuple(results))

    def kept(self, wanted: Callable[[Trial], bool]) -> Contents:
        """The wanted results, and what was chosen or timed with such alone."""
        results = tuple(filter(wanted, self.results))
        gone = {result.key.sha256 for result in self.results} - {result.key.sha256 for result in results}

        def stands(recipe: Recipe) -> bool:
            return gone.isdisjoint(pick.key for pick in recipe.picks)

        recipes = tuple(each for each in self.recipes if stands(each.recipe))
        return Contents(results, recipes, tuple(each for each in self.chains if stands(each.key.recipe)))


def _shipped(provenance: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in provenance.items() if name != IMPORTED}


def _date(kept: Trial | ChainTrial) -> str:
    return str(kept.provenance.get("date") or EPOCH)


def contents_of(store: Store) -> Contents:
    """All that a store holds, in the order of its first keeping."""
    with store._reading() as session:
        return read(session)


def read(session: Session) -> Contents:
    keys = {row.id: _sound(row) for row in session.scalars(select(KeyRow))}
    return Contents(
        tuple(
            trial_of(row, keys[row.key_id])
            for row in session.scalars(select(TrialRow).options(lazyload(TrialRow.key)).order_by(TrialRow.id))
        ),
        tuple(
            KeptRecipe(device.value(), row.value(), row.created_at)
            for row, device in session.execute(
                select(RecipeRow, DeviceRow).join(DeviceRow, RecipeRow.device_id == DeviceRow.id).order_by(RecipeRow.id)
            )
        ),
        tuple(row.value() for row in session.scalars(select(ChainRow).order_by(ChainRow.id))),
    )


def _sound(row: KeyRow) -> TuningKey:
    key = row.value()
    if key.sha256 != row.sha256:
        raise ValueError(f"a key's parts are not those of its digest {row.sha256[:8]}")
    return key


def keep(store: Store, change: Callable[[Contents], Contents]) -> None:
    """Keep what ``change`` makes of the store's contents in addition to them, in one transaction: of one identity it
    replaces what is there."""
    with store._writing() as session:
        with store._damage_told():
            contents = read(session)
        _Writing(store, session).put(change(contents))


def retain(store: Store, change: Callable[[Contents], Contents]) -> None:
    """Keep what ``change`` makes of the store's contents in place of them, in one transaction."""
    with store._writing() as session:
        with store._damage_told():
            contents = change(read(session))
        for table in DATA_TABLES:
            session.execute(delete(table))
        session.expunge_all()
        _Writing(store, session).put(contents)


class _Writing:
    """One transaction's way from values to rows, many at once, in the values' order."""

    def __init__(self, store: Store, session: Session) -> None:
        self._store, self._session = store, session
        self._ids: dict[tuple[type[Base], str], int] = {}

    def put(self, contents: Contents) -> None:
        key_ids = self._key_ids({result.key.sha256: result.key for result in contents.results})
        self._upsert_all(TrialRow, ["key_id", "config"], [
            {
                "key_id": key_ids[result.key.sha256], "config": result.config, "validation": result.validation,
                "provenance": result.provenance, "created_at": result.created_at,
                **measurement_columns(result.measurement),
            }
            for result in contents.results
        ])
        self._crown(list(key_ids.values()))
        self._upsert_all(RecipeRow, list(RecipeRow.IDENTITY), [self._recipe(kept) for kept in contents.recipes])
        self._upsert_all(ChainRow, ["sha256"], [
            {
                **chain_columns(chain.key, self._id), "provenance": chain.provenance, "created_at": chain.created_at,
                **measurement_columns(chain.measurement),
            }
            for chain in contents.chains
        ])

    def _recipe(self, kept: KeptRecipe) -> dict[str, Any]:
        device_id = self._id(DeviceRow, kept.device.to_dict())
        return {"device_id": device_id, **recipe_columns(kept.recipe), "created_at": kept.created_at}

    def _key_ids(self, keys: dict[str, TuningKey]) -> dict[str, int]:
        """The rows of these keys, made where there are none, locked until the transaction ends."""
        ids = self._found(keys)
        missing = [key for sha256, key in keys.items() if sha256 not in ids]
        self._upsert_all(KeyRow, None, [key_columns(key, self._id) for key in missing])
        return ids if len(ids) == len(keys) else self._found(keys)

    def _found(self, keys: dict[str, TuningKey]) -> dict[str, int]:
        found: dict[str, int] = {}
        for some in _batches(list(keys)):
            rows = select(KeyRow.sha256, KeyRow.id).where(KeyRow.sha256.in_(some)).with_for_update()
            found.update((sha256, key_id) for sha256, key_id in self._session.execute(rows))
        return found

    def _id(self, row: Any, values: dict[str, Any]) -> int:
        known = row, canonical({name: values[name] for name in row.IDENTITY})
        if known not in self._ids:
            self._ids[known] = self._store._id_of(self._session, row, values)
        return self._ids[known]

    def _upsert_all(self, row: Any, identity: list[str] | None, rows: list[dict[str, Any]]) -> None:
        """``identity`` None: what is there stays."""
        if not rows:
            return
        insert = self._store._upsert(row.__table__)
        if identity is None:
            statement = insert.on_conflict_do_nothing()
        else:
            replaced = {name: insert.excluded[name] for name in rows[0] if name not in identity}
            statement = insert.on_conflict_do_update(index_elements=identity, set_=replaced)
        self._session.connection().execute(statement, rows)

    def _crown(self, key_ids: Sequence[int]) -> None:
        """Each key's winner, as the store chooses it."""
        of_key: dict[int, list[TrialRow]] = defaultdict(list)
        for some in _batches(key_ids):
            ok = select(TrialRow).where(TrialRow.key_id.in_(some), TrialRow.status == "ok").order_by(TrialRow.id)
            ok = ok.options(lazyload(TrialRow.key)).execution_options(populate_existing=True)
            for row in self._session.scalars(ok):
                of_key[row.key_id].append(row)
        winners = []
        for key_id, rows in of_key.items():
            with self._store._damage_told():
                best = rows[best_of([row.measurement() for row in rows])]
            winners.append({"key_id": key_id, "trial_id": best.id, "median_us": best.median_us})
        for some in _batches([key_id for key_id in key_ids if key_id not in of_key]):
            self._session.execute(delete(WinnerRow).where(WinnerRow.key_id.in_(some)))
        self._upsert_all(WinnerRow, ["key_id"], winners)


def _batches(values: Sequence[Any]) -> Iterable[Sequence[Any]]:
    return (values[start : start + ROWS_AT_ONCE] for start in range(0, len(values), ROWS_AT_ONCE))
