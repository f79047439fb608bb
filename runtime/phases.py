"""A step's phases as ranges in a profile, which cost nothing where nothing watches them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

Watch = Callable[[str], AbstractContextManager[Any]]

_NOTHING: AbstractContextManager[Any] = nullcontext()
_watch: Watch | None = None


def phase(name: str) -> AbstractContextManager[Any]:
    """The range ``Muon: name`` of a profile."""
    if _watch is not None:
        return _watch(name)
    if is_watched():
        return torch.autograd.profiler.record_function(f"Muon: {name}")
    return _NOTHING


def is_watched() -> bool:
    """Whether a profiler runs, or another takes the ranges in its place."""
    return _watch is not None or torch.autograd.profiler._is_profiler_enabled  # set for such questions


@contextmanager
def watched(by: Watch) -> Iterator[None]:
    """Within it ``by(name)`` is each phase's range in place of the profiler's."""
    global _watch
    kept, _watch = _watch, by
    try:
        yield
    finally:
        _watch = kept
