"""Says what in a record that was read from a file cannot be, since anyone may have edited it."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator
from typing import Any

MOST = 1e12  # µs or seconds: more than was ever measured, and few enough to add up


def faults(record: Any) -> Iterator[str]:
    """What is wrong in a Record's fields, whatever types they are of; each assumes that none came before."""
    for name in ("problem", "kernel", "device"):
        if not isinstance(getattr(record, name), str):
            yield f"{name} must be a text, not {_short(getattr(record, name))}"
    if not isinstance(record.axes, dict):
        yield f"axes must be an object, not {_short(record.axes)}"
    for name, values in record.axes.items():
        yield from _items(f"axes[{name!r}]", values, "a text, a usual number, true, false or null", _is_value)
        if not values or len(set(values)) < len(values):
            yield f"axes[{name!r}] = {_short(values)} must hold values that differ"
    yield from _rows(record)
    count = len(record.rows)
    yield from _items("times_us", record.times_us, "a time above 0 or null", _is_time, count)
    if all(time_us is None for time_us in record.times_us):
        yield "times_us holds no time: no configuration worked"
    yield from _items("first", record.first, f"a row's number, 0 to {count - 1}", lambda row: _is_place(row, count))
    for name in ("compile_s", "run_s"):
        seconds = getattr(record, name)
        yield from _items(name, seconds, "seconds, 0 or more, or null", _is_duration, None if seconds == [] else count)


def _rows(record: Any) -> Iterator[str]:
    yield from _items("rows", record.rows, "an array", lambda row: isinstance(row, list))
    if not record.rows:
        yield "rows is empty"
    sizes = [len(values) for values in record.axes.values()]
    for number, row in enumerate(record.rows):
        if len(row) != len(sizes) or not all(map(_is_place, row, sizes)):
            yield f"rows[{number}] = {_short(row)} must have a place on each of {len(sizes)} axes"
    if len(set(map(tuple, record.rows))) < len(record.rows):
        yield "rows holds a configuration twice"


def _items(
    name: str, items: Any, wanted: str, fits: Callable[[Any], bool], count: int | None = None
) -> Iterator[str]:
    """What is wrong with an array of so many items (None: any number), each of which fits."""
    if not isinstance(items, list):
        yield f"{name} must be an array, not {_short(items)}"
    if count is not None and len(items) != count:
        yield f"{name} has {len(items)} items for {count} rows"
    for number, item in enumerate(items):
        if not fits(item):
            yield f"{name}[{number}] must be {wanted}, not {_short(item)}"


def _is_place(value: Any, count: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < count


def _is_number(value: Any) -> bool:
    """Whether a value is a number of usual size, which NaN is not, so that sums of such are finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -MOST <= value <= MOST


def _is_value(value: Any) -> bool:
    return value is None or isinstance(value, str | bool) or _is_number(value)


def _is_time(value: Any) -> bool:
    return value is None or _is_number(value) and value > 0


def _is_duration(value: Any) -> bool:
    return value is None or _is_number(value) and value >= 0


def _short(value: Any) -> str:
    return reprlib.repr(value)
