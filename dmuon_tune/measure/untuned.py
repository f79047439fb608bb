"""What runs where nothing was tuned: the form of a group's chain, and the kernel and configuration of each product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import ops
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Form, Recipe
from dmuon_tune.spec import KernelSpec

from .winners import library_kernel

# Backends preferred first, where they beat the library on an H200 (2026-11-29): CuTe DSL's polar_small took 16 us at
# 64x128x128 and 77 us at 12x256x1024; its apply took .90 of the library's time, the geometric mean of 29 shapes (1.09
# at worst), and writes any dtype without a copy.
FUSED = {
    "momentum": ("triton",), "polar_small": ("cutedsl", "triton"), "gram_span": ("cutedsl",), "apply": ("cutedsl",),
}
UPDATE = ("cutedsl", "triton")  # of apply with the weights' update
# Of symmetric products, preferred first, each from the order m where it beat the library on an H200 (2026-11-29): CuTe
# DSL 1.25x at 256, 1.6x at 768, 1.3x at 1024 and 2x at 4096, TileLang 1.3x at 4096 and slower than the library at 2048.
SYMMETRIC_FROM_M = {"cutedsl": 256, "tilelang": 4096}
# Between forms of equal FLOPs: whole chains took 2057 µs in the Gram form and 2176 in the plain one at 1×4096×4096,
# 7719 and 7388 at 56×1536×1536 (H200, 2026-11-30).
GRAM_FROM_M = 4096
# Up to here, in batch·m³, the Gram form's steps run a span a launch where an untuned kernel has that: 1×1536 and 32×512
# gained 18 and 8 %, 24×768 and 16×1024 (H200, 2026-11-30, docs/span.md) lost 4 and 20 %.
SPAN_TO_CUBES = 6 * 10**9


def fused(problem: Problem, specs: Iterable[KernelSpec]) -> list[KernelSpec]:
    """The kernels that fuse what the library does in several passes, the preferred first."""
    preferred = UPDATE if problem.epilogue == "w" else FUSED.get(problem.op, ())
    return _ordered(preferred, problem, specs)


def symmetric(problem: Problem, specs: Iterable[KernelSpec], device: DeviceFingerprint) -> list[KernelSpec]:
    """The kernels of a symmetric product on a GPU that is large enough for them, the preferred first: lower tiles alone
    halve the work. Elsewhere the library is the safe choice."""
    if device.kind != "cuda" or not ops()[problem.op].symmetric_output:
        return []
    return _ordered([name for name, fewest in SYMMETRIC_FROM_M.items() if problem.m >= fewest], problem, specs)


def _ordered(backends: Sequence[str], problem: Problem, specs: Iterable[KernelSpec]) -> list[KernelSpec]:
    found = {spec.backend: spec for spec in specs if spec.op == problem.op}
    return [found[name] for name in backends if name in found]


def choice(
    problem: Problem, specs: Sequence[KernelSpec], device: DeviceFingerprint
) -> tuple[KernelSpec, Any] | None:
    """The kernel of ``specs`` that runs a problem untuned, and its configuration; None without any."""
    library = [spec for spec in specs if spec.name == library_kernel(problem.op)]
    found = (*fused(problem, specs), *symmetric(problem, specs, device), *library)
    configs = ((spec, spec.untuned(problem, device)) for spec in found)
    return next(((spec, config) for spec, config in configs if config is not None), None)


def default_form(recipe: Recipe, flops: Callable[[Problem], int], is_fused: Callable[[Problem], bool]) -> Form:
    """The form of a recipe's group: the whole recurrence in one launch where a kernel has it for a 16-bit chain, else
    the cheaper form. ``flops`` and ``is_fused`` as for :func:`cheaper_form`."""
    if recipe.dtype != "float32" and all(map(is_fused, replace(recipe, form="small").products())):
        return "small"
    return cheaper_form(recipe, flops, is_fused)


def cheaper_form(recipe: Recipe, flops: Callable[[Problem], int], is_fused: Callable[[Problem], bool]) -> Form:
    """The form of fewer FLOPs by the kernels at hand, which compute a symmetric product's lower tiles or all of it.

    ``flops`` are a problem's by the kernel that would serve it, ``is_fused`` says whether a kernel runs a span in one
    launch. Five steps with one restart: plain 15·m²n + 5·m³ and Gram 6·m²n + 14·m³, equal at n = m; in a library that
    knows no symmetry 20·m²n + 10·m³ and 8·m²n + 28·m³, equal at n = 1.5·m. Where they are equal the plain form, of
    fewer launches and the more accurate one in fp16, but for matrices from GRAM_FROM_M on.
    """
    plain, gram = (
        sum(count * flops(problem) for problem, count in replace(recipe, form=form).products().items())
        for form in ("plain", "gram")
    )
    if gram > plain or (gram == plain and recipe.group.m < GRAM_FROM_M):
        return "plain"
    return "span" if _in_spans(replace(recipe, form="span"), is_fused) else "gram"


def _in_spans(recipe: Recipe, is_fused: Callable[[Problem], bool]) -> bool:
    """Whether the Gram form runs by spans: fewer launches, and products between which nothing leaves the L2."""
    spans = [problem for problem in recipe.products() if problem.op == "gram_span"]
    return recipe.group.batch * recipe.group.m**3 <= SPAN_TO_CUBES and all(map(is_fused, spans))


def flops(problem: Problem, spec: KernelSpec) -> int:
    """FLOPs of a product by this kernel: the library computes a symmetric one in full."""
    op = ops()[problem.op]
    return op.flops(problem) * (2 if op.symmetric_output and spec.name == library_kernel(problem.op) else 1)
