"""``gram_span`` in CuTe DSL: all symmetric products of a span in one cooperative launch (Hopper)."""

from __future__ import annotations

from dmuon_tune.spec import KernelSpec

from ._cutedsl_span_space import SOURCES, SpanConfig, illegality, program, refusal
from ._cutedsl_span_untuned import heuristic, seeds

KERNEL = KernelSpec(
    "gram_span", "cutedsl", SpanConfig, refusal, program, (__name__, *SOURCES), illegality, heuristic, seeds=seeds
)
