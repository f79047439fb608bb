"""Which products a model's groups need, and what share of the work each is."""

from __future__ import annotations

from collections.abc import Iterable

from dmuon_tune.kernel_specs import ops
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, chain, forms


def workload(groups: Iterable[Group], dtype: str) -> dict[Problem, int]:
    """Problem → weight, the most expensive first.

    The weight is the product's floating-point operations in one optimizer step: launches × FLOPs a launch, summed over
    the groups that need it. Where a group's forms need the same product, the form that needs it most counts.
    """
    flops = {name: op.flops for name, op in ops().items()}
    weights: dict[Problem, int] = {}
    for group in groups:
        launches: dict[Problem, int] = {}
        for form in forms(group):
            for problem, count in chain(group, form, dtype).items():
                launches[problem] = max(count, launches.get(problem, 0))
        for problem, count in launches.items():
            weights[problem] = weights.get(problem, 0) + count * flops[problem.op](problem)
    return dict(sorted(weights.items(), key=lambda item: (-item[1], item[0])))
