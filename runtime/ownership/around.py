"""What an owner's step moves around a chain: gradients, momentum and updates in the model's own dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dmuon_tune.cache import CacheEntry
from dmuon_tune.kernel_specs import ops
from dmuon_tune.problem import ITEM_BYTES, Problem
from dmuon_tune.recipe import WEIGHTS_DTYPE, Recipe, first_launch

# Bytes a microsecond where no first launch was timed: of an H200's (2026-11-30); of a CPU's memory, a round number.
DEFAULT_BANDWIDTHS = {"cuda": 3.8e6, "cpu": 10e3}


@dataclass(frozen=True)
class Element:
    """Bytes of one element on its owner: of the gradient, the momentum, and the weights' dtype, its update's."""

    gradient: int
    momentum: int
    weight: int

    @property
    def moved(self) -> int:
        """Of what an owner's step reads and writes besides the chain: momentum's two passes (see ``bytes_moved`` of
        the op), and the update."""
        return 2 * self.gradient + 3 * self.momentum + self.weight

    @property
    def carried(self) -> int:
        """Of a buffer that holds one way's or the other's."""
        return max(self.gradient, self.weight)


AS_TIMED = Element(*[ITEM_BYTES[WEIGHTS_DTYPE]] * 3)  # a chain with its first launch, see Recipe


@dataclass(frozen=True)
class Around:
    """What is around a chain in an owner's step: ``element``'s bytes, so many a microsecond."""

    element: Element
    bandwidth: float

    def us(self, recipe: Recipe, batch: int) -> float:
        """Microseconds of what a recipe's time does not have in it yet."""
        first = first_launch(recipe.group, recipe.dtype)
        has = AS_TIMED.moved if any(pick.problem == first for pick in recipe.picks) else ITEM_BYTES[recipe.dtype]
        return batch * recipe.group.rows * recipe.group.cols * max(0, self.element.moved - has) / self.bandwidth


def bandwidth(recipes: Iterable[Recipe], entries: Callable[[Problem], Iterable[CacheEntry]], kind: str) -> float:
    """Bytes a microsecond of the largest of the recipes' first launches that was timed."""
    first = {first_launch(recipe.group, recipe.dtype) for recipe in recipes} if kind == "cuda" else ()
    for problem in sorted(first, key=lambda problem: (-problem.batch * problem.m * problem.n, problem)):
        times_us = [entry.measurement.median_us for entry in entries(problem)]
        if known := [us for us in times_us if us]:
            return ops()[problem.op].bytes_moved(problem) / min(known)
    return DEFAULT_BANDWIDTHS[kind]
