"""A step's phases as ranges in a profile, which cost nothing where no profiler runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_NOTHING: AbstractContextManager[Any] = nullcontext()


def phase(name: str) -> AbstractContextManager[Any]:
    """The range ``Muon: name``."""
    if torch.autograd.profiler._is_profiler_enabled:  # PyTorch's own; a range takes some 10 µs without one too
        return torch.autograd.profiler.record_function(f"Muon: {name}")
    return _NOTHING
