"""The runtime: a plan (cache → callables), Newton–Schulz on it, and the Muon optimizer that uses both."""

from __future__ import annotations

if __name__ == "runtime":
    raise ImportError("import dmuon_tune.runtime, not runtime")

from dmuon_tune.coefficients import COEFFICIENTS, CoefficientSet

from .blocks import Split
from .dedicated.dedicate import dedicate, no_sync
from .distributed.clipping import clip_grad_norm_
from .muon import Muon
from .newton_schulz import GramNewtonSchulz
from .ownership_options import OwnershipOptions
from .plan import Plan, plan
from .report import Report

__all__ = [
    "COEFFICIENTS", "CoefficientSet", "GramNewtonSchulz", "Muon", "OwnershipOptions", "Plan", "Report", "Split",
    "clip_grad_norm_", "dedicate", "no_sync", "plan",
]
