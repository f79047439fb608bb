"""Which products a model's groups need, and what share of the work each is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dmuon_tune import recipe
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import ops
from dmuon_tune.measure.winners import library_kernel
from dmuon_tune.problem import ITEM_BYTES, Problem
from dmuon_tune.recipe import WEIGHTS_DTYPE, Group, chain, end_for, forms
from dmuon_tune.spec import KernelSpec

ALIGNMENT_BYTES = 16  # of a matrix, for vector loads and TMA
WHOLE = ("polar_small", "gram_span")  # ops that are a form's, many products in one launch
WITH_ENDS = ("cuda",)  # device kinds on which kernels read gradients and write weights by their addresses


def workload(
    groups: Iterable[Group], dtype: str, specs: Sequence[KernelSpec], device: DeviceFingerprint
) -> dict[Problem, int]:
    """Problem → weight, the most expensive first.

    The weight is the product's floating-point operations in one optimizer step: launches × FLOPs a launch, summed over
    the groups that need it. Where a group's forms need the same product, the form that needs it most counts.
    """
    flops = {name: op.flops for name, op in ops().items()}
    weights: dict[Problem, int] = {}
    for group in groups:
        launches: dict[Problem, int] = {}
        for form in served_forms(group, dtype, specs, device):
            for problem, count in chain(group, form, dtype).items():
                launches[problem] = max(count, launches.get(problem, 0))
        for problem, count in launches.items():
            weights[problem] = weights.get(problem, 0) + count * flops[problem.op](problem)
    return dict(sorted(weights.items(), key=lambda item: (-item[1], item[0])))


def ends(
    groups: Iterable[Group], dtype: str, specs: Sequence[KernelSpec], device: DeviceFingerprint,
    weights_dtype: str = WEIGHTS_DTYPE,
) -> dict[Problem, Problem | None]:
    """What an optimizer's step launches in place of the groups' first and last products, where kernels serve it: the
    end → the product that it stands for (:func:`dmuon_tune.recipe.ends`), for bf16 weights, in which chains are timed,
    and those of ``weights_dtype``. On a CPU PyTorch does all of it."""
    if not with_ends(device):
        return {}
    found: dict[Problem, Problem | None] = {}
    for group in groups:
        for form in served_forms(group, dtype, specs, device):
            usual = recipe.ends(group, form, dtype)
            found |= usual
            found |= {end_for(end, weights_dtype): like for end, like in usual.items()}
    found = {end: like for end, like in found.items() if end != like}  # where weights are of the chain's own dtype
    return {end: like for end, like in found.items() if is_served(end, specs, device)}


def with_ends(device: DeviceFingerprint) -> bool:
    """Whether the optimizer launches kernels at a chain's ends here."""
    return device.kind in WITH_ENDS


def is_served(end: Problem, specs: Sequence[KernelSpec], device: DeviceFingerprint) -> bool:
    """Whether a kernel runs and can be measured: weights of one tensor must each begin where kernels can read them."""
    aligned = end.m * end.n * ITEM_BYTES[end.out_dtype] % ALIGNMENT_BYTES == 0
    if end.epilogue == "w" and end.batch > 1 and not aligned:
        return False
    return any(spec.op == end.op and spec.untuned(end, device) is not None for spec in specs)


def served_forms(
    group: Group, dtype: str, specs: Sequence[KernelSpec], device: DeviceFingerprint
) -> tuple[str, ...]:
    """The forms worth comparing here: those with an op of their own where kernels of ``specs`` run it that are not the
    library's, which would be the separate products again."""

    def is_served(problem: Problem) -> bool:
        return problem.op not in WHOLE or any(
            spec.op == problem.op and spec.name != library_kernel(spec.op) and spec.legal_space(problem, device)
            for spec in specs
        )

    return tuple(form for form in forms(group, dtype) if all(map(is_served, chain(group, form, dtype))))
