"""One file per sampler: which legal configuration of a kernel is measured next. No central list."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from logging import getLogger
from typing import Any, ClassVar

import numpy as np

from dmuon_tune.errors import UsageError, raised

logger = getLogger(__name__)
DEFAULT = "combined"

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class LegalSpace:
    """One kernel's legal configurations of one problem.

    ``axes``: each axis's choices in a meaningful order; ``indices``: (configurations, axes), each the place of its
    value among its axis's choices.
    """

    axes: tuple[tuple[Any, ...], ...]
    indices: Ints

    def __len__(self) -> int:
        return len(self.indices)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """How many values each axis has."""
        return tuple(map(len, self.axes))

    @cached_property
    def points(self) -> Floats:
        """(configurations, axes), each axis scaled to 0..1."""
        return self.indices / np.maximum(np.array(self.levels, dtype=np.float64) - 1, 1)


class Sampler:
    """What a file of this folder exports as ``SAMPLER``, a subclass with a ``name`` and a ``summary``.

    Configurations are rows of ``space``. ``first`` are the likeliest rows, best first, for a sampler that uses such
    knowledge. Equal seeds and outcomes give equal picks. ``times_us`` are the rows' times in the order of observation,
    None of those that failed; ``pending`` were picked and are under way. A sampler that ``is_blind`` costs nothing to
    replay to its space's end: its picks depend on no outcome and no chance.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    is_blind: ClassVar[bool] = False

    def __init__(self, space: LegalSpace, seed: int, first: Sequence[int] = ()) -> None:
        self.space, self.first = space, tuple(first)
        self.rng = np.random.default_rng(seed)
        self.times_us: dict[int, float | None] = {}
        self.pending: set[int] = set()

    def observe(self, row: int, time_us: float | None) -> None:
        """Learn a configuration's time, None where it failed."""
        self.times_us[row] = time_us
        self.pending.discard(row)

    def pick(self, unseen: Ints) -> int:
        """One of the rows ``unseen``, which are at least one, ascending."""
        row = self.choose(unseen)
        self.pending.add(row)
        return row

    def choose(self, unseen: Ints) -> int:
        """:meth:`pick`'s choice: what a sampler has to say."""
        raise NotImplementedError


@cache
def samplers() -> dict[str, type[Sampler]]:
    """Every sampler by name: one file each in this folder; a file that is of no use is left out with a warning."""
    found: dict[str, type[Sampler]] = {}
    for module in pkgutil.iter_modules(__path__):
        name = f"{__name__}.{module.name}"
        try:
            kind = vars(importlib.import_module(name)).get("SAMPLER", Sampler)
            if not issubclass(kind, Sampler) or kind is not Sampler and not isinstance(kind.name, str):
                raise TypeError("SAMPLER must be a subclass of Sampler with a name")
        except (Exception, SystemExit) as error:
            logger.warning("sampler module %s is left out: %s", name, raised(error, name))
        else:
            if kind is not Sampler:
                found[kind.name] = kind
    return found


def sampler_type(name: str) -> type[Sampler]:
    """The sampler of this name; UsageError lists the names where there is none."""
    if name not in samplers():
        raise UsageError(f"unknown sampler {name!r}; choose among {', '.join(sorted(samplers()))}")
    return samplers()[name]
