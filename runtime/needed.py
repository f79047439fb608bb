"""Which kernels training runs for what a cache was tuned for: those that artefacts are built of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dmuon_tune import space
from dmuon_tune.backends import CompiledKernel, makes_portable
from dmuon_tune.cache import CacheEntry, Layers
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernel
from dmuon_tune.problem import DTYPES, Problem
from dmuon_tune.recipe import WEIGHTS_DTYPE, Group, Recipe, chain, forms
from dmuon_tune.spec import KernelSpec

from .ends import resolve_ends
from .plan import _bind
from .resolve import Resolver

# (Weights' dtype, momentum's mode, whether the weights are updated in the last product) of the optimizer, of its
# distributed form, whose weights FSDP2's mixed precision keeps in fp32, and of an orthogonalization alone.
ENDS = (
    (WEIGHTS_DTYPE, "n", True), (WEIGHTS_DTYPE, "n", False), ("float32", "n", False), (WEIGHTS_DTYPE, "none", False),
)


@dataclass(frozen=True)
class Needed:
    """One kernel, problem and configuration to compile for a device."""

    spec: KernelSpec
    problem: Problem
    config: Any


def of_groups(
    groups: Collection[Group], recipes: Sequence[Recipe], winners: Iterable[CacheEntry]
) -> tuple[list[Recipe], list[CacheEntry]]:
    """Of a cache the recipes for matrices of these groups' shapes, in batches of any size, and for groups that have no
    recipe the winners of all their products."""
    shapes = {(group.rows, group.cols) for group in groups}
    own = [recipe for recipe in recipes if (recipe.group.rows, recipe.group.cols) in shapes]
    without = set(groups) - {recipe.group for recipe in own}
    problems = {
        problem for dtype in DTYPES for group in without for form in forms(group, dtype)
        for problem in chain(group, form, dtype)
    }
    return own, [entry for entry in winners if entry.key.problem in problems]


def needed(
    layers: Layers, device: DeviceFingerprint, recipes: Iterable[Recipe], winners: Iterable[CacheEntry]
) -> list[Needed]:
    """What compiles to portable code of the winners, of the recipes' products and of their ends (ENDS).

    ``device`` need not be here: nothing is compiled.
    """
    found: dict[tuple[str, Problem, str], Needed] = {}

    def note(spec: KernelSpec, problem: Problem, config: Any, device: DeviceFingerprint) -> CompiledKernel:
        if makes_portable(spec.backend):
            found.setdefault((spec.name, problem, space.config_json(config)), Needed(spec, problem, config))
        return CompiledKernel(lambda *arguments: None)

    def note_kept(name: str, problem: Problem, config: dict[str, Any]) -> None:
        spec = kernel(name)
        note(spec, problem, space.config_from_dict(spec.Config, config), device)

    resolver = Resolver(device, layers, use_nearest=False, build=note)
    for recipe in recipes:
        planned = _bind(resolver, "", recipe)
        for bound in planned.bindings.values():  # a small form is resolved here and compiled at its first launch
            note_kept(bound.kernel, bound.problem, dict(bound.config))
        for dtype, mode, updates_weights in ENDS:
            resolve_ends(planned, resolver, dtype, mode, dtype, updates_weights)
    for entry in winners:
        note_kept(entry.key.kernel, entry.key.problem, entry.config)
    return list(found.values())
