"""Ownership: which rank orthogonalizes which matrix, so that the slowest owner is done as early as possible."""

from __future__ import annotations

from .assignment import Assignment, Work, assign
from .costs import Costs

__all__ = ["Assignment", "Costs", "Work", "assign"]
