"""The chain that training runs where nothing was tuned, with which a group's search begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import ops
from dmuon_tune.measure import untuned
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, Recipe
from dmuon_tune.spec import KernelSpec

from .ends import end_picks, pick_of
from .workload import with_ends


def untuned_chain(
    group: Group, dtype: str, specs: Sequence[KernelSpec], device: DeviceFingerprint
) -> Recipe | None:
    """The whole batch at once in the form that the untuned rules say; None where ``specs`` lack a product's kernel."""

    def flops(problem: Problem) -> int:
        found = untuned.choice(problem, specs, device)
        return untuned.flops(problem, found[0]) if found else ops()[problem.op].flops(problem)

    def is_fused(problem: Problem) -> bool:
        return any(spec.untuned(problem, device) is not None for spec in untuned.fused(problem, specs))

    bare = Recipe(group, "gram", dtype)
    return as_untuned(replace(bare, form=untuned.default_form(bare, flops, is_fused)), specs, device)


def as_untuned(recipe: Recipe, specs: Sequence[KernelSpec], device: DeviceFingerprint) -> Recipe | None:
    """The recipe with untuned kernels for its products and ends; None where ``specs`` lack one of a product."""
    picks = []
    for problem in recipe.products():
        found = untuned.choice(problem, specs, device)
        if found is None:
            return None
        picks.append(pick_of(problem, *found, device))
    last = next(reversed(recipe.products()))
    lasts = [pick for pick in picks if (pick.problem.op, pick.problem.epilogue) == (last.op, last.epilogue)]
    at_ends = end_picks(recipe, lasts, lambda _: None, specs, device) if with_ends(device) else ()
    return replace(recipe, picks=(*picks, *at_ends))
