"""Ownership: which rank orthogonalizes which matrix, so that the slowest owner is done as early as possible."""

from __future__ import annotations

from .around import Element
from .assignment import Assignment, assign
from .costs import Costs, Point
from .instance import Work
from .pricing import Timed, costs, costs_of
from .profile import batches, profile, shares

__all__ = [
    "Assignment", "Costs", "Element", "Point", "Timed", "Work", "assign", "batches", "costs", "costs_of", "profile",
    "shares",
]
