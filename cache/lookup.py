"""The two look-ups of training, in SQL that is made once: a problem's entries and a group's recipe."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from typing import Any

from sqlalchemy import Row, TextClause, text

from dmuon_tune.device import DeviceFingerprint, Toolchain
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Recipe

from . import sound
from .key import TuningKey
from .models import DeviceRow, ProblemRow, RecipeRow
from .results import CacheEntry

MEASURED = ("status", "median_us", "p20_us", "p80_us", "samples", "max_rel_err", "resources", "log")
OF_KEY = ("kernel.name", "kernel.spec_digest", "chain.backend", "chain.versions", "held.validation", "device.name")
OF_TRIAL = ("config", "validation", "provenance", *MEASURED)
JSON_FIELDS = ("restarts", "picks", "batch_costs")  # of a recipe


@cache
def entries_sql(of_problem: bool, of_device: bool) -> TextClause:
    """Every winner, fastest first; its parameters are a problem's fields and a device's limits.

    ``+ 0`` keeps a database from going through all keys of the device in place of those of the problem.
    """
    columns = (
        *OF_KEY, *_named("device", DeviceRow.IDENTITY), *_named("problem", ProblemRow.IDENTITY),
        *_named("trial", OF_TRIAL),
    )
    given = (*(ProblemRow.IDENTITY if of_problem else ()), *(DeviceRow.IDENTITY if of_device else ()))
    where = " AND ".join(f"{_table_of(name)}.{name} = :{name}" for name in given)
    return text(f"""
        SELECT {', '.join(columns)} FROM dmuon_winners AS best
        JOIN dmuon_trials AS trial ON trial.id = best.trial_id JOIN dmuon_keys AS held ON held.id = best.key_id
        JOIN dmuon_problems AS problem ON problem.id = held.problem_id
        JOIN dmuon_kernels AS kernel ON kernel.id = held.kernel_id
        JOIN dmuon_devices AS device ON device.id = held.device_id + 0
        JOIN dmuon_toolchains AS chain ON chain.id = held.toolchain_id
        {'WHERE ' + where if where else ''} ORDER BY best.median_us, best.key_id""")


def entry_of(row: Row[Any]) -> CacheEntry:
    """ValueError and the like for what is none."""
    values: list[Any] = list(row)
    (kernel, digest, backend, versions, checked, name), values = values[: len(OF_KEY)], values[len(OF_KEY) :]
    limits, values = values[: len(DeviceRow.IDENTITY)], values[len(DeviceRow.IDENTITY) :]
    fields, values = values[: len(ProblemRow.IDENTITY)], values[len(ProblemRow.IDENTITY) :]
    config, validation, provenance, status, median_us, p20_us, p80_us, samples, error, resources, log = values
    toolchain = Toolchain.from_dict({"backend": backend, "versions": json.loads(versions)})
    key = TuningKey(Problem(*fields), kernel, digest, DeviceFingerprint(name, *limits), toolchain, checked)
    times = (median_us, p20_us, p80_us, json.loads(samples))
    measurement = sound.measurement(status, *times, error, json.loads(resources), log)
    config = sound.mapping(json.loads(config), "a configuration")
    return CacheEntry(key, config, measurement, validation, sound.mapping(json.loads(provenance), "a provenance"))


@cache
def recipe_sql() -> TextClause:
    """A group's recipe; its parameters are ``batch``, ``rows``, ``cols``, ``dtype`` and a device's limits."""
    group = " AND ".join(f"recipe.{name} = :{name}" for name in ("batch", "rows", "cols", "dtype"))
    limits = " AND ".join(f"device.{name} = :{name}" for name in DeviceRow.IDENTITY)
    return text(f"""
        SELECT {', '.join(_named('recipe', RecipeRow.FIELDS))} FROM dmuon_recipes AS recipe
        JOIN dmuon_devices AS device ON device.id = recipe.device_id WHERE {group} AND {limits}""")


def recipe_of(row: Row[Any], group: dict[str, int]) -> Recipe:
    """ValueError and the like for what is none."""
    fields = dict(zip(RecipeRow.FIELDS, row, strict=True))
    return sound.recipe({"group": group, **fields, **{name: json.loads(fields[name]) for name in JSON_FIELDS}})


def _named(table: str, columns: Iterable[str]) -> list[str]:
    return [f"{table}.{column}" for column in columns]


def _table_of(name: str) -> str:
    return "problem" if name in ProblemRow.IDENTITY else "device"
