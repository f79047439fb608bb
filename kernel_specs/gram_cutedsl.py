"""``gram`` in CuTe DSL: TMA and wgmma over the tiles of the lower triangle (Hopper)."""

from __future__ import annotations

from dmuon_tune.spec import KernelSpec

from ._cutedsl_space import SOURCES, SymmetricConfig, illegality, program, refusal
from ._cutedsl_untuned import heuristic, seeds

KERNEL = KernelSpec(
    "gram", "cutedsl", SymmetricConfig, refusal, program, (__name__, *SOURCES), illegality, heuristic, seeds=seeds
)
