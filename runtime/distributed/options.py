"""The options that all ranks must have alike: as text to be compared at every step, and by name where they differ."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
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


def check_alike(given: Mapping[str, Any], control: Control) -> None:
    """UsageError on all ranks that names an option which is not the same on all of them; collective."""
    first, *others = control.gather(dict(given), "options")
    for rank, other in zip(control.ranks[1:], others, strict=True):
        for option in {**first, **other}:
            here, there = first.get(option), other.get(option)
            if here != there:
                raise UsageError(
                    f"{option} is {shown(there)} on rank {rank} and {shown(here)} on rank {control.ranks[0]}; give all "
                    "ranks the same"
                )


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else str(value.device.type)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool | str):
        return value
    return float(value) if isinstance(value, Real) else str(value)
