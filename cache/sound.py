"""From rows to values: ValueError for what no run has written, whatever type the database let through."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any

from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import DTYPES
from dmuon_tune.recipe import Recipe

# What reading values that no run has written may raise.
MALFORMED = (ValueError, TypeError, AttributeError, LookupError, RecursionError)


def mapping(value: Any, what: str) -> dict[str, Any]:
    _require(isinstance(value, dict), what, value)
    found: dict[str, Any] = value
    return found


def measurement(
    status: Any, median_us: Any, p20_us: Any, p80_us: Any, samples: Any, max_rel_err: Any, resources: Any, log: Any
) -> Measurement:
    _require(isinstance(samples, list) and None not in samples, "the samples", samples)
    _require_times((median_us, p20_us, p80_us, *samples))
    _require(max_rel_err is None or (_is_number(max_rel_err) and max_rel_err >= 0), "an error", max_rel_err)
    race = mapping(resources, "what was measured besides").get("race", {})
    _require(isinstance(race, dict) and _is_natural(race.get("place", 0)), "a race", race)
    _require(isinstance(log, str), "a log", log)
    return Measurement(status, median_us, p20_us, p80_us, tuple(samples), max_rel_err, resources, log)


def recipe(fields: dict[str, Any]) -> Recipe:
    """From the fields of :meth:`Recipe.to_dict`."""
    found = Recipe.from_dict(fields)
    group = found.group
    _require(isinstance(found.form, str), "a form", found.form)
    _require(found.dtype in DTYPES, "a dtype", found.dtype)
    costs = found.batch_costs
    chunk = () if found.chunk is None else (found.chunk,)
    for extent in (group.batch, group.rows, group.cols, *chunk, *(batch for batch, _ in costs)):
        _require(_is_natural(extent) and extent > 0, "an extent", extent)
    for step in (found.steps, *found.restarts):
        _require(_is_natural(step), "a step", step)
    _require_times((found.cost_us, found.p20_us, found.p80_us, *(cost_us for _, cost_us in costs)))
    for pick in found.picks:
        mapping(pick.config, "a configuration")
        _require(isinstance(pick.kernel, str) and isinstance(pick.key, str), "a kernel", pick.kernel)
    return found


def _require_times(values: Iterable[Any]) -> None:
    for value in values:
        _require(value is None or (_is_number(value) and 0 < value < inf), "a time", value)


def _require(is_sound: bool, what: str, value: Any) -> None:
    if not is_sound:
        raise ValueError(f"{what} cannot be {value!r:.100}")


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or type(value) is int


def _is_natural(value: Any) -> bool:
    return type(value) is int and value >= 0
