"""Ownership: which rank orthogonalizes which matrix, so that the slowest owner is done as early as possible."""

from __future__ import annotations

from .assignment import Assignment, assign
from .costs import Costs
from .instance import Work

__all__ = ["Assignment", "Costs", "Work", "assign"]
