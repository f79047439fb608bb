"""Checks of a caller's options: UsageError names the option, what it must be, and what was given, in one line."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any, TypeVar

from .errors import UsageError
from .words import counted, shown

T = TypeVar("T")


def is_number(value: Any) -> bool:
    """Whether this is a real number, or a tensor or array of one; bools are none."""
    try:
        only = value.item()
    except Exception:  # no tensor, or one of several elements: each library has its own error
        only = value
    return isinstance(only, Real) and not isinstance(only, bool)


def number(option: str, value: Any, below: float = math.inf) -> None:
    """At least 0 and less than ``below``."""
    if not is_number(value) or not 0.0 <= float(value) < below:
        wanted = "a finite number of at least 0" if below == math.inf else f"a number in [0, {below:g})"
        raise UsageError(f"{option} must be {wanted}, not {shown(value)}")


def flag(option: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{option} must be True or False, not {shown(value)}")


def integer(option: str, value: Any, least: int = 1) -> None:
    """An integer of at least so much."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{option} must be an integer of at least {least}, not {shown(value)}")


def integers(option: str, values: Any) -> tuple[int, ...]:
    """The values, integers of at least 1."""
    listed = tuple(values) if isinstance(values, Iterable) else (None,)
    if any(isinstance(value, bool) or not isinstance(value, int) or value < 1 for value in listed):
        raise UsageError(f"{option} must be a sequence of integers of at least 1, not {shown(values)}")
    return listed


def restarts(values: Any, steps: int) -> tuple[int, ...]:
    """The steps before which an iteration of so many restarts, in order, each once: from 1 to ``steps`` - 1."""
    found = sorted(set(integers("restarts", values)))
    if found and found[-1] >= steps:
        allowed = f"from 1 to {steps - 1}" if steps > 1 else "none, ()"
        raise UsageError(f"restarts of {counted(steps, 'step')} must be {allowed}, not {found[-1]}")
    return tuple(found)


def strings(option: str, values: Any, what: str) -> None:
    """A sequence of strings; ``what`` they are."""
    if isinstance(values, str):
        raise UsageError(f"{option} must be a sequence of {what}, not {shown(values)}; write [{shown(values)}]")
    if not isinstance(values, Iterable) or not all(isinstance(value, str) for value in values):
        raise UsageError(f"{option} must be a sequence of {what}, not {shown(values)}")


def each_of(option: str, values: Any, kind: type[T]) -> tuple[T, ...]:
    """The values, all of this type."""
    listed = tuple(values) if isinstance(values, Iterable) else (None,)
    if not all(isinstance(value, kind) for value in listed):
        raise UsageError(f"{option} must be a sequence of {kind.__name__}, not {shown(values)}")
    return listed


def one_of(option: str, value: Any, known: Iterable[str], where: str = "") -> None:
    """One of the known names; ``where`` it was given."""
    listed = tuple(known)
    if not isinstance(value, str) or value not in listed:
        raise UsageError(f"{where}unknown {option} {shown(value)}; choose one of {', '.join(listed)}")


def instance(option: str, value: Any, kind: type, or_none: bool = True) -> None:
    """An object of this type, or None."""
    if not (value is None and or_none) and not isinstance(value, kind):
        raise UsageError(f"{option} must be a {kind.__name__}, not {shown(value)}")
