"""A chain's ends: the kernels that read matrices where they lie, and those that write the result where it is wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dmuon_tune.measure.winners import library_kernel
from dmuon_tune.problem import DTYPES, Problem

from .plan import GroupPlan
from .resolve import Binding, Resolver

Launch = Callable[..., Any]


@dataclass(frozen=True)
class Ends:
    """Launches around a chain; where one is missing, PyTorch does its work in more passes.

    ``first`` is the op ``momentum``. By piece size: ``last`` writes the wanted dtype, ``direct`` is the small form on
    the matrices as they are, ``weights`` updates the weights in the last product; that has no βX, so before it the
    plain form's last Z + aI is ``with_identity``'s.
    """

    first: Launch | None
    last: Mapping[int, Launch]
    direct: Mapping[int, Launch]
    weights: Mapping[int, Launch]
    with_identity: Mapping[int, Launch]


@dataclass(frozen=True)
class BoundEnds:
    """The bindings of :class:`Ends`, under the same names."""

    first: Binding | None
    last: Mapping[int, Binding]
    direct: Mapping[int, Binding]
    weights: Mapping[int, Binding]
    with_identity: Mapping[int, Binding]

    def ends(self) -> Ends:
        """Their launches."""
        by_size = (self.last, self.direct, self.weights, self.with_identity)
        launches = ({size: bound.launch for size, bound in every.items()} for every in by_size)
        return Ends(self.first.launch if self.first else None, *launches)

    def mapped(self, change: Callable[[Binding], Binding]) -> BoundEnds:
        """The same of other bindings."""
        by_size = (self.last, self.direct, self.weights, self.with_identity)
        changed = ({size: change(bound) for size, bound in every.items()} for every in by_size)
        return BoundEnds(change(self.first) if self.first else None, *changed)


def resolve_ends(
    planned: GroupPlan, resolver: Resolver, source: str, mode: str, out: str, updates_weights: bool
) -> Ends:
    """The launches of :func:`bind_ends`."""
    return bind_ends(planned, resolver, source, mode, out, updates_weights).ends()


def bind_ends(
    planned: GroupPlan, resolver: Resolver, source: str, mode: str, out: str, updates_weights: bool
) -> BoundEnds:
    """The ends of a group's chain for matrices of dtype ``source``, momentum ``mode`` and results of dtype ``out``."""
    recipe, group = planned.recipe, planned.recipe.group
    last: dict[int, Binding | None] = {}
    direct: dict[int, Binding | None] = {}
    weights: dict[int, Binding | None] = {}
    with_identity: dict[int, Binding | None] = {}
    for size in set(recipe.pieces):
        like = planned.endings[size]
        if out == recipe.dtype:
            last[size] = like
        if resolver.device.kind == "cpu" or not {source, out} <= set(DTYPES):
            continue
        written = replace(like.problem, out_dtype=out)
        if recipe.form == "small" and mode == "none":
            direct[size] = resolver.bind_end(replace(written, dtype=source), like)
        elif out != recipe.dtype:
            last[size] = resolver.bind_end(written, like)
        if not updates_weights or recipe.form == "small":
            continue
        if recipe.form == "plain":
            with_identity[size] = _with_identity(planned.bound(size, "gemm_symmetric", "c"), resolver)
        if recipe.form != "plain" or with_identity[size]:
            weights[size] = resolver.bind_end(replace(written, epilogue="w"), like)
    first = None
    if resolver.device.kind == "cuda" and source in DTYPES:
        problem = Problem("momentum", group.batch, group.m, group.n, 1, source, recipe.dtype, "row", mode)
        first = resolver.bind_end(problem)
    return BoundEnds(first, *map(_found, (last, direct, weights, with_identity)))


def _with_identity(like: Binding, resolver: Resolver) -> Binding | None:
    """The product of ``like`` + γI; None where it would cost accuracy: the library adds γI to what it has rounded, in
    bf16 up to 13 % of the polar factor's error (docs/numerics.md)."""
    found = resolver.bind_end(replace(like.problem, epilogue="ci"), like)
    twice = found is not None and found.kernel == library_kernel(found.problem.op)
    return None if twice and like.problem.dtype == "bfloat16" else found


def _found(bound: Mapping[int, Binding | None]) -> dict[int, Binding]:
    return {size: binding for size, binding in bound.items() if binding is not None}
