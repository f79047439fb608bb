"""``apply`` in CuTe DSL: a persistent TMA and wgmma product, α, βX or the weight's update in its epilogue (Hopper)."""

from __future__ import annotations

from dmuon_tune.spec import KernelSpec

from ._cutedsl_apply_space import SOURCES, ApplyConfig, illegality, program, refusal
from ._cutedsl_apply_untuned import heuristic, seeds

KERNEL = KernelSpec(
    "apply", "cutedsl", ApplyConfig, refusal, program, (__name__, *SOURCES), illegality, heuristic,
    seeds=seeds,
)
