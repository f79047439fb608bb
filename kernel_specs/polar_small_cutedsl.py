"""``polar_small`` in CuTe DSL: a cluster of blocks a matrix, wgmma on X and XXᵀ in shared memory (Hopper)."""

from __future__ import annotations

from dmuon_tune.spec import KernelSpec

from ._cutedsl_polar_space import SOURCES, PolarConfig, illegality, program, refusal
from ._cutedsl_polar_untuned import heuristic

KERNEL = KernelSpec(
    "polar_small", "cutedsl", PolarConfig, refusal, program, (__name__, *SOURCES), illegality, heuristic
)
