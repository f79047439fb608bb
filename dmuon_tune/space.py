"""Search spaces: a kernel's Config dataclass is its space (field metadata) and its untuned kernel (field defaults)."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

CHOICES = "choices"


def choice(default: Any, choices: Sequence[Any]) -> Any:
    """A Config field: its default and every value that the search may try, in a meaningful order."""
    if default not in choices:
        raise ValueError(f"default {default!r} is not among the choices {tuple(choices)!r}")
    return dataclasses.field(default=default, metadata={CHOICES: tuple(choices)})


def axes(config_type: type) -> dict[str, tuple[Any, ...]]:
    """Field name → the values it may take; a field without choices stays at its default."""
    return {
        field.name: tuple(field.metadata.get(CHOICES, (field.default,)))
        for field in dataclasses.fields(config_type)
    }


def size(config_type: type) -> int:
    """How many configurations the space holds before legality is asked."""
    count = 1
    for values in axes(config_type).values():
        count *= len(values)
    return count


@lru_cache(64)
def enumerate_space(config_type: type) -> tuple[Any, ...]:
    """Every configuration of the space, in a fixed order."""
    return tuple(each_of(config_type))


def each_of(config_type: type) -> Iterator[Any]:
    """The same, one after another: a large space has 10⁵ of them. Where nothing but a frozen dataclass's own
    constructor would run, its fields are set in half of that one's time."""
    names, is_plain = axes(config_type), not hasattr(config_type, "__post_init__")
    for values in itertools.product(*names.values()):
        if is_plain:
            config: Any = object.__new__(config_type)
            config.__dict__.update(zip(names, values, strict=True))
            yield config
        else:
            yield config_type(**dict(zip(names, values, strict=True)))


def config_to_dict(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def config_json(config: Any) -> str:
    """Canonical text of a configuration: equal configurations give equal text."""
    return json.dumps(config_to_dict(config), sort_keys=True, separators=(",", ":"))


def config_from_dict(config_type: type, fields: dict[str, Any]) -> Any:
    """The configuration with these fields; ValueError where they are not this Config's fields."""
    known = {field.name for field in dataclasses.fields(config_type)}
    if set(fields) != known:
        raise ValueError(f"{config_type.__name__} has fields {sorted(known)}, not {sorted(fields)}")
    try:
        return config_type(**fields)
    except Exception as error:  # of its own checks
        raise ValueError(f"{config_type.__name__} takes no {fields}: {error}") from error
