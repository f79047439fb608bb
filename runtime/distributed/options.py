"""The options that all ranks must have alike: as text to be compared at every step, and by name where they differ."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from numbers import Real
from typing import Any

from torch import Tensor

from dmuon_tune.errors import UsageError
from dmuon_tune.words import shown

from ..parameters import needed_options
from .control import Control


def options_of(groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What a step reads of the groups, by name; numbers on a device are not read."""
    return {
        f"group {index}: {option}": _plain(group[option])
        for index, group in enumerate(groups) for option in needed_options(group["use_muon"])
    }


def digest(options: Mapping[str, Any]) -> bytes:
    """Four bytes that are other ones where options are."""
    return zlib.crc32(json.dumps(options).encode()).to_bytes(4)


def check_alike(given: Mapping[str, Any], control: Control, what: str = "options") -> None:
    """UsageError on all ranks that names what of ``given``, as JSON has it, is not the same on all; collective."""
    if not control.differ(given, what):
        return
    first, *others = control.gather(dict(given), what)
    for rank, other in zip(control.ranks[1:], others, strict=True):
        for option in {**first, **other}:
            if first.get(option) != other.get(option):
                name, *values = _difference(option, first.get(option), other.get(option))
                here, there = (value if isinstance(value, str) else shown(value) for value in values)
                raise UsageError(
                    f"{name} is {there} on rank {rank} and {here} on rank {control.ranks[0]}; give all ranks the same"
                )


def _difference(what: str, here: Any, there: Any) -> tuple[str, Any, Any]:
    """Where two values as JSON first differ, and both there: in lists of names, or of mappings that have one."""
    both = [here, there]
    if all(isinstance(each, list) for each in both) and any(isinstance(each, str | dict) for each in here + there):
        pairs = enumerate(zip_longest(here, there))
        place, both = next((place, list(pair)) for place, pair in pairs if pair[0] != pair[1])
        names = [each["name"] if isinstance(each, dict) else each for each in both]
        if names[0] != names[1]:
            return f"{what}[{place}]", *names
        what = names[0]
    if all(isinstance(each, dict) for each in both):
        key = next(key for key in {**both[0], **both[1]} if both[0].get(key) != both[1].get(key))
        return f"{what}: {key}", *(each.get(key) for each in both)
    return what, *both


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else str(value.device.type)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool | str):
        return value
    return float(value) if isinstance(value, Real) else str(value)
