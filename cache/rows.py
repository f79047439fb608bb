"""The way between values and rows: a key's, a recipe's and a measurement's columns, and results from their rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Text, and_, not_, or_, type_coerce

from dmuon_tune.measurement import Measurement
from dmuon_tune.recipe import Recipe

from . import sound
from .chains import ChainKey
from .key import TuningKey
from .models import DeviceRow, KernelRow, ProblemRow, RecipeRow, ToolchainRow, TrialRow
from .results import CacheEntry, Trial

IdOf = Callable[[Any, dict[str, Any]], int]  # of the row that has these values, made where there is none


def key_columns(key: TuningKey, id_of: IdOf) -> dict[str, Any]:
    return {
        "sha256": key.sha256, "problem_id": id_of(ProblemRow, key.problem.to_dict()),
        "kernel_id": id_of(KernelRow, {"name": key.kernel, "spec_digest": key.spec_digest}),
        "device_id": id_of(DeviceRow, key.device.to_dict()),
        "toolchain_id": id_of(ToolchainRow, key.toolchain.to_dict()), "validation": key.validation,
    }


def recipe_columns(recipe: Recipe) -> dict[str, Any]:
    """All but the device's and the date."""
    group, fields = recipe.group, recipe.to_dict()
    return {"batch": group.batch, "rows": group.rows, "cols": group.cols} | {
        name: fields[name] for name in RecipeRow.FIELDS
    }


def chain_columns(key: ChainKey, id_of: IdOf) -> dict[str, Any]:
    return {
        "sha256": key.sha256, "device_id": id_of(DeviceRow, key.device.to_dict()), "recipe": key.identity(),
        "code_digest": key.code_digest,
    }


def measurement_columns(measurement: Measurement) -> dict[str, Any]:
    """A measurement as the columns of :class:`.models.Outcome`."""
    error = measurement.max_rel_err
    return {
        **measurement.to_dict(),
        "samples": list(measurement.samples),
        "max_rel_err": math.inf if error is not None and math.isnan(error) else error,  # SQLite keeps NaN as NULL
        "log": measurement.log.replace("\0", "").encode(errors="replace").decode(),
    }


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def trial_of(row: TrialRow, key: TuningKey) -> Trial:
    return Trial(key, *_result(row), row.created_at)


def entry_of_row(row: TrialRow) -> CacheEntry:
    return CacheEntry(row.key.value(), *_result(row))


def _result(row: TrialRow) -> tuple[dict[str, Any], Measurement, str, dict[str, Any]]:
    """Configuration, measurement, how it was checked, provenance."""
    config, provenance = sound.mapping(row.config, "a configuration"), sound.mapping(row.provenance, "a provenance")
    return config, row.measurement(), row.validation, provenance


def is_better(new: Any, kept: Any) -> ColumnElement[bool]:
    """Whether a result goes in place of the one that is kept of its configuration."""

    def says(row: Any, name: str) -> ColumnElement[bool]:
        return type_coerce(row.resources, Text).contains(f'"{name}":')  # only what is true, and canonical text

    cleaner = and_(says(kept, "contended"), not_(says(new, "contended")))
    as_clean = or_(says(kept, "contended"), not_(says(new, "contended")))
    better = or_(cleaner, and_(as_clean, new.median_us < kept.median_us))
    return and_(new.status == "ok", or_(kept.status != "ok", and_(not_(says(kept, "race")), better)))
