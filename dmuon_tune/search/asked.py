"""Asks a sampler which configuration is next, checks its answer, and names it in the error where that is none."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from dmuon_tune.errors import UsageError, raised

from .samplers import LegalSpace, Sampler

Mask = np.ndarray[Any, np.dtype[np.bool_]]


class AskedSampler:
    """A sampler of this space; UsageError with its name where it raises or picks what is not to be had."""

    def __init__(self, kind: type[Sampler], space: LegalSpace, seed: int, first: Sequence[int]) -> None:
        self._kind = kind
        with self._named("making it"):
            self._sampler = kind(space, seed, first)

    def observe(self, row: int, time_us: float | None) -> None:
        with self._named("observe"):
            self._sampler.observe(row, time_us)

    def pick(self, is_unseen: Mask) -> int:
        """The sampler's choice among the unseen rows, at least one, which is then seen."""
        with self._named("pick"):
            picked: Any = self._sampler.pick(np.flatnonzero(is_unseen))
        wrong = _wrong(picked, is_unseen)
        if wrong:
            raise self._error(f"picked {reprlib.repr(picked)}, {wrong}")
        is_unseen[picked] = False
        return int(picked)

    @contextmanager
    def _named(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            raise self._error(f"raised in {doing}: {raised(error, self._kind.__module__)}") from error

    def _error(self, fault: str) -> UsageError:
        kind = self._kind
        return UsageError(
            f"sampler {kind.name!r} of module {kind.__module__} {fault}; mend it, or choose another sampler"
        )


def _wrong(picked: Any, is_unseen: Mask) -> str | None:
    """What is wrong with a pick, None where nothing is."""
    if isinstance(picked, bool) or not isinstance(picked, int | np.integer):
        return "which is not an integer"
    if not 0 <= picked < len(is_unseen):
        return f"which is no row: there are {len(is_unseen)}"
    return None if is_unseen[picked] else "which was picked before"
