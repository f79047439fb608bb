"""Costs of a model's shapes: by the chains that were timed on a device, and for the others by FLOPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dmuon_tune.cache import CacheEntry, Layers
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import ops
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import (
    DEFAULT_RESTARTS,
    DEFAULT_STEPS,
    MAX_BATCH_ELEMENTS,
    Group,
    Recipe,
    chain,
    default_dtype,
)

from .around import Around, Element, bandwidth
from .costs import Costs, Point

# FLOPs a microsecond where nothing was timed: of whole fp16 chains on an H200, 510 to 630 from 10¹² FLOPs on
# (2026-11-30); of a CPU an order of magnitude. Only their ratios matter to an assignment.
DEFAULT_RATES = {"cuda": 500e6, "cpu": 100e3}

Shape = tuple[int, int]  # rows, cols


@dataclass(frozen=True)
class Timed:
    """A group's whole chain took ``us`` microseconds; ``measured``, or summed up from its products' times."""

    group: Group
    us: float
    measured: bool = True


def costs_of(
    groups: Iterable[Group], device: DeviceFingerprint, dtype: str | None = None, layers: Layers | None = None,
    steps: int = DEFAULT_STEPS, restarts: Sequence[int] = DEFAULT_RESTARTS, element: Element | None = None,
) -> dict[Shape, Costs]:
    """(rows, cols) → its costs on ``device`` up to as many matrices as ``groups`` hold of it, by the recipes in
    ``layers`` (default: those of this machine) for chains in ``dtype`` (default: the device's); with ``element`` those
    of an owner's whole step."""
    opened = Layers.open() if layers is None else layers
    try:
        recipes = [recipe for _, recipe in opened.recipes(device)]
        known = known_of(
            recipes, lambda problem: [entry for _, entry in opened.entries(problem, device)], device.kind, dtype, steps,
            restarts, element,
        )
    finally:
        if layers is None:
            opened.close()
    return costs(groups, known, device.kind, steps, restarts)


def known_of(
    recipes: Iterable[Recipe], entries: Callable[[Problem], Iterable[CacheEntry]], kind: str, dtype: str | None = None,
    steps: int = DEFAULT_STEPS, restarts: Sequence[int] = DEFAULT_RESTARTS, element: Element | None = None,
) -> list[Timed]:
    """What recipes, of a group the first, and a problem's ``entries`` say of the device ``kind`` they are of; see
    :func:`costs_of`."""
    alike = [recipe for recipe in recipes if recipe.dtype == (dtype or default_dtype(kind))]
    around = Around(element, bandwidth(alike, entries, kind)) if element else None
    return timed(alike, steps, restarts, around)


def timed(
    recipes: Iterable[Recipe], steps: int = DEFAULT_STEPS, restarts: Sequence[int] = DEFAULT_RESTARTS,
    around: Around | None = None,
) -> list[Timed]:
    """What recipes say of such chains' times; the first of a group counts. Those of other steps are taken in
    proportion to the FLOPs."""
    found: dict[Group, Timed] = {}
    for recipe in recipes:
        group, whole = recipe.group, (recipe.steps, recipe.restarts) == (steps, tuple(restarts))
        ratio = flops(group, steps, restarts) / flops(group, recipe.steps, recipe.restarts)
        more = [(batch, cost_us, True) for batch, cost_us in recipe.batch_costs]
        for batch, cost_us, is_timed in [(group.batch, recipe.cost_us, recipe.timed), *more]:
            if cost_us is not None:
                us = cost_us * ratio + (around.us(recipe, batch) if around else 0.0)
                of = Group(batch, group.rows, group.cols)
                found.setdefault(of, Timed(of, us, is_timed and whole))
    return list(found.values())


def costs(
    groups: Iterable[Group], known: Sequence[Timed], kind: str, steps: int = DEFAULT_STEPS,
    restarts: Sequence[int] = DEFAULT_RESTARTS,
) -> dict[Shape, Costs]:
    """(rows, cols) → its costs by the chains in ``known``, on a device of ``kind`` (cuda, cpu).

    Batch sizes below the least that was timed of a shape, 1, 2, 4 and so on, are estimated: FLOPs over the rate of the
    nearest timed chain, by FLOPs and both sides; with none over DEFAULT_RATES.
    """
    totals: dict[Shape, int] = {}
    for group in groups:
        totals[group.rows, group.cols] = totals.get((group.rows, group.cols), 0) + group.batch
    estimate = _Estimate(known, kind, steps, tuple(restarts))
    result = {}
    for (rows, cols), total in totals.items():
        own = [each for each in known if (each.group.rows, each.group.cols) == (rows, cols)]
        points = [Point(each.group.batch, each.us, each.measured) for each in own]
        least = min(own, key=lambda each: each.group.batch, default=None)
        below = total + 1 if least is None else least.group.batch
        batches = [2**power for power in range(below.bit_length()) if 2**power < below]
        if least is None and total not in batches:
            batches.append(total)
        points += [Point(batch, estimate.us(Group(batch, rows, cols), least), False) for batch in batches]
        result[rows, cols] = Costs.of(points, max(1, MAX_BATCH_ELEMENTS // (rows * cols)))
    return result


class _Estimate:
    """Times of chains that were not timed."""

    def __init__(self, known: Sequence[Timed], kind: str, steps: int, restarts: tuple[int, ...]) -> None:
        self._known = [each for each in known if each.measured] or list(known)
        self._default_rate, self._steps, self._restarts = DEFAULT_RATES[kind], steps, restarts
        self._shortest = min(self._known, key=lambda each: each.us, default=None)

    def us(self, group: Group, larger: Timed | None) -> float:
        """Microseconds. No less than the shortest chain, where that has fewer FLOPs: launches take time too; no more
        than a ``larger`` batch of the same shape, and at no better rate."""
        work = self._flops(group)
        nearest = min(self._known, key=lambda each: self._distance(group, each.group), default=None)
        if nearest is None:
            return work / self._default_rate
        us = work * nearest.us / self._flops(nearest.group)
        if self._shortest is not None and work >= self._flops(self._shortest.group):
            us = max(us, self._shortest.us)
        if larger is not None:
            us = min(max(us, larger.us * group.batch / larger.group.batch), larger.us)
        return us

    def _flops(self, group: Group) -> float:
        return flops(group, self._steps, self._restarts)

    def _distance(self, group: Group, other: Group) -> float:
        """In octaves."""
        ratios = self._flops(group) / self._flops(other), group.m / other.m, group.n / other.n
        return sum(abs(math.log2(ratio)) for ratio in ratios)


def flops(group: Group, steps: int = DEFAULT_STEPS, restarts: Sequence[int] = DEFAULT_RESTARTS) -> float:
    """Of the whole batch in the Gram form, symmetric products counted once: 6m²n + 14m³ a matrix by default."""
    return group.batch * _flops_of_one(Group(1, group.rows, group.cols), steps, tuple(restarts))


@lru_cache(maxsize=1024)
def _flops_of_one(group: Group, steps: int, restarts: tuple[int, ...]) -> int:
    products = chain(group, "gram", "float16", steps, restarts)
    return sum(count * ops()[problem.op].flops(problem) for problem, count in products.items())
