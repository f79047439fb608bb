"""Searches kernels' configurations for a model's products and keeps every result in the cache."""

from __future__ import annotations

from .options import ProblemReport, TuneOptions, TuneReport
from .plan import plan
from .progress import Progress, terminal_progress
from .tuner import tune

__all__ = ["ProblemReport", "Progress", "TuneOptions", "TuneReport", "plan", "terminal_progress", "tune"]
