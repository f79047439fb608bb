"""Searches each group's recipe: forms, pieces and tied kernels, decided by timing whole chains."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dmuon_tune import chains
from dmuon_tune.cache import CacheEntry, Store
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import ops
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measure.chain import chain_key
from dmuon_tune.measure.winners import library_kernel
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import ITEM_BYTES, Problem
from dmuon_tune.recipe import Group, Pick, Recipe, chain, first_launch, written
from dmuon_tune.space import config_from_dict
from dmuon_tune.spec import KernelSpec

from .ends import end_picks, pick_of
from .start import as_untuned
from .workload import ALIGNMENT_BYTES, is_served, with_ends

HOPELESS = 2.0  # times the cheapest form's sum of winners, on cold operands: no chain gains that much over another
FASTER = 1.01  # a chain replaces the best one where it is faster by more than a graph's run-to-run difference
L2_SHARE = 0.5  # of the L2 that a piece's square matrices may fill: X passes through it too
CLOSE = 1.03  # kernels whose medians alone are this close may change places inside a chain ...
CLOSE_OWN = 1.08  # an own kernel's beside the library's: at 1x1024x1024 that was 5 % faster alone, and its chain slower
CLOSE_IN_L2 = 1.1  # ... and more so where the chain finds in the L2 what was cold when the product was timed alone

FORMS, OWN, PRICES, RIVALS, PIECES = range(5)  # a search's stages

Role = tuple[str, str]  # (op, epilogue): a product's place in a chain


@dataclass(frozen=True)
class Tuned:
    """A product's winner and those that may be faster inside a chain, the fastest first; ``own`` is this project's
    fastest kernel where the library won by little."""

    winner: CacheEntry
    rivals: tuple[CacheEntry, ...] = ()
    own: CacheEntry | None = None

    @property
    def median_us(self) -> float:
        return self.winner.measurement.median_us or 0.0


def close(problem: Problem, device: DeviceFingerprint) -> float:
    """How many times the fastest median a kernel's may be to be tried inside a chain."""
    in_l2 = ops()[problem.op].bytes_moved(problem) <= L2_SHARE * device.l2_bytes
    return CLOSE_IN_L2 if in_l2 else CLOSE


def estimates(
    group: Group, forms: Iterable[str], dtype: str, tuned: Mapping[Problem, Tuned]
) -> list[Recipe]:
    """A recipe for each form whose products all have winners, the smallest sum of their times first."""
    costed = []
    for form in forms:
        products = chain(group, form, dtype)
        if products.keys() <= tuned.keys():
            cost_us = sum(count * tuned[problem].median_us for problem, count in products.items())
            costed.append(Recipe(group, form, dtype, cost_us=cost_us + _ends_us(group, form, dtype, tuned)))
    return sorted(costed, key=lambda recipe: recipe.cost_us or 0.0)


def _ends_us(group: Group, form: str, dtype: str, tuned: Mapping[Problem, Tuned]) -> float:
    """What the first launch and a bf16 result add to a chain's products, as far as they were tuned."""
    last = list(chain(group, form, dtype))[-1]
    first, end = first_launch(group, dtype), written(last)
    begin_us = tuned[first].median_us if first in tuned else 0.0
    return begin_us + (tuned[end].median_us - tuned[last].median_us if end in tuned else 0.0)


def chunks(group: Group, form: str, dtype: str, l2_bytes: int) -> list[int]:
    """Halves, quarters and so on of a batch, down to the first whose square matrices stay in the L2; none where a piece
    would begin at an address that kernels cannot read."""
    per_matrix = chains.SQUARES[form] * group.m**2 * ITEM_BYTES[dtype]
    found: list[int] = []
    most = group.batch if group.rows * group.cols * ITEM_BYTES[dtype] % ALIGNMENT_BYTES == 0 else 1
    while most > 1 and most * per_matrix > L2_SHARE * l2_bytes:
        most = -(-most // 2)
        found.append(most)
    return found


def priced(groups: Iterable[Group]) -> dict[Group, tuple[int, ...]]:
    """The batches whose costs each group's search finds out: 1, 2, 4, … below a shape's largest group, by that one
    alone, without those that are groups themselves."""
    batches: dict[tuple[int, int], list[int]] = {}
    for group in groups:
        batches.setdefault((group.rows, group.cols), []).append(group.batch)
    return {
        Group(max(found), rows, cols): tuple(
            2**power for power in range(max(found).bit_length()) if 2**power < max(found) and 2**power not in found
        )
        for (rows, cols), found in batches.items()
    }


class ChainSearch:
    """One group's search: ``candidate`` is the chain to time next, None at the end; ``observe`` tells its outcome.

    First ``start``, the chain that runs untuned, so that what is kept is never slower. Then coordinate by coordinate,
    what promises most first (``stage``): the form, with the winners' kernels and the whole batch at once; own kernels
    where the library won by little; the costs of the smaller batches ``prices``, by which matrices are divided among
    owners; then what gains a few percent at most: each product's rivals, where the chain spends most first, and smaller
    pieces, for which everything compiles anew.
    """

    def __init__(
        self, estimated: Sequence[Recipe], tuned: Mapping[Problem, Tuned], specs: Sequence[KernelSpec],
        device: DeviceFingerprint, start: Recipe | None = None, prices: Sequence[int] = (),
    ) -> None:
        self.group = estimated[0].group
        self._start, self._prices = start, prices
        self._start_outcome: Measurement | None = None
        self.stage = FORMS
        self._estimated, self._tuned, self._device = estimated, tuned, device
        self._specs = {spec.name: spec for spec in specs}
        self._failed: set[str] = set()
        self._best: tuple[Recipe, Measurement] | None = None
        self._costs: list[tuple[int, float]] = []
        self._steps = self._walk()
        self.candidate = next(self._steps, None)

    def observe(self, measurement: Measurement) -> None:
        try:
            self.candidate = self._steps.send(measurement)
        except StopIteration:
            self.candidate = None

    @property
    def urgency(self) -> tuple[int, float]:
        """Of groups' chains the least goes first: the earlier stage, then the longer chain."""
        return self.stage, -(self.best_us or self._estimated[0].cost_us or 0.0)

    @property
    def best_us(self) -> float | None:
        return self._best[1].median_us if self._best else None

    def recipe(self) -> Recipe:
        """The fastest chain timed so far; where none was, the cheapest estimate of a form that did not fail."""
        if self._best is None:
            left = [recipe for recipe in self._estimated if recipe.form not in self._failed]
            return (left or self._estimated)[0]
        recipe, measurement = self._best
        return replace(
            recipe, cost_us=measurement.median_us, p20_us=measurement.p20_us, p80_us=measurement.p80_us,
            batch_costs=tuple(self._costs),
        )

    def _walk(self) -> Generator[Recipe, Measurement, None]:
        limit_us = HOPELESS * (self._estimated[0].cost_us or 0.0)
        if self._start is not None:
            yield from self._time(self._start)
        for place, recipe in enumerate(self._estimated):
            if (recipe.cost_us or 0.0) <= limit_us or len(self._failed) == place:
                yield from self._try(replace(recipe, cost_us=None), {})
        if self._best is None:
            return
        are_winners_known = self._best[0].products().keys() <= self._tuned.keys()
        picked: dict[Role, CacheEntry] = {}
        if are_winners_known:
            self.stage = OWN
            picked = yield from self._prefer_own()
        self.stage = PRICES
        yield from self._price(picked)
        if are_winners_known:
            yield from self._refine(self._best[0], picked)

    def _refine(self, recipe: Recipe, picked: dict[Role, CacheEntry]) -> Generator[Recipe, Measurement, None]:
        """Rivals, then pieces; ``picked`` is what the fastest chain has in place of winners."""
        assert self._best is not None
        self.stage = RIVALS
        for role, found in self._by_worth(recipe).items():
            for rival in found.rivals:
                if rival != found.own:  # which was tried before
                    other = {**picked, role: rival}
                    if (yield from self._try(self._best[0], other)):
                        picked = other
        self.stage = PIECES
        for chunk in chunks(self.group, recipe.form, recipe.dtype, self._device.l2_bytes):
            yield from self._try(replace(recipe, chunk=chunk), picked)

    def _by_worth(self, recipe: Recipe) -> dict[Role, Tuned]:
        """The products of a whole batch, those that the chain spends most time in first."""
        products = chain(self.group, recipe.form, recipe.dtype)
        ranked = sorted(products, key=lambda problem: -products[problem] * self._tuned[problem].median_us)
        return {(problem.op, problem.epilogue): self._tuned[problem] for problem in ranked}

    def _prefer_own(self) -> Generator[Recipe, Measurement, dict[Role, CacheEntry]]:
        """Own kernels for all products that the library won by little at once, else for one after another; returns what
        the fastest chain has."""
        assert self._best is not None
        recipe = self._best[0]
        own = {role: found.own for role, found in self._by_worth(recipe).items() if found.own is not None}
        if len(own) > 1 and (yield from self._try(recipe, own)):
            return own
        picked: dict[Role, CacheEntry] = {}
        for role, entry in own.items():
            if (yield from self._try(recipe, {**picked, role: entry})):
                picked[role] = entry
        return picked

    def _try(self, recipe: Recipe, picked: Mapping[Role, CacheEntry]) -> Generator[Recipe, Measurement, bool]:
        """Time a chain and keep it where it is the fastest; whether it is."""
        measurement = yield from self._time(replace(recipe, picks=self._picks(recipe, picked)))
        if measurement.median_us is None:
            self._failed.add(recipe.form)
        return self._best is not None and self._best[1] is measurement

    def _time(self, complete: Recipe) -> Generator[Recipe, Measurement, Measurement]:
        """Time a chain and keep it where it is the fastest; the untuned one only once."""
        if complete == self._start and self._start_outcome is not None:
            return self._start_outcome
        measurement = yield complete
        if complete == self._start:
            self._start_outcome = measurement
        is_faster = self._best is None or (measurement.median_us or 0.0) * FASTER <= (self.best_us or 0.0)
        if measurement.median_us is not None and is_faster:
            self._best = complete, measurement
        return measurement

    def _price(self, picked: Mapping[Role, CacheEntry]) -> Generator[Recipe, Measurement, None]:
        assert self._best is not None
        whole = self._best[0]
        for batch in self._prices:
            smaller = replace(whole, group=replace(self.group, batch=batch), picks=())
            untuned = as_untuned(smaller, list(self._specs.values()), self._device) if whole == self._start else None
            measurement = yield untuned or replace(smaller, picks=self._picks(smaller, picked))
            if measurement.median_us is not None:
                self._costs.append((batch, measurement.median_us))

    def _picks(self, recipe: Recipe, picked: Mapping[Role, CacheEntry]) -> tuple[Pick, ...]:
        whole = {(p.op, p.epilogue): p for p in chain(self.group, recipe.form, recipe.dtype)}
        picks = tuple(
            self._pick(problem, picked.get(role, self._tuned[whole[role]].winner))
            for problem in recipe.products()
            for role in [(problem.op, problem.epilogue)]
        )
        return (*picks, *self._end_picks(recipe, picks, list(whole)[-1]))

    def _end_picks(self, recipe: Recipe, picks: Sequence[Pick], last: Role) -> tuple[Pick, ...]:
        """A chain on a GPU is timed from gradients to results in the weights' dtype."""
        if not with_ends(self._device):
            return ()

        def winner(end: Problem) -> CacheEntry | None:
            found = self._tuned.get(end) or self._tuned.get(replace(end, batch=self.group.batch))
            return found.winner if found else None

        lasts = (pick for pick in picks if (pick.problem.op, pick.problem.epilogue) == last)
        return end_picks(recipe, lasts, winner, list(self._specs.values()), self._device)

    def _pick(self, problem: Problem, entry: CacheEntry) -> Pick:
        """The chosen kernel, at another batch than the tuned one with the same configuration where that is legal."""
        if problem != entry.key.problem and problem in self._tuned:
            entry = self._tuned[problem].winner  # this batch was tuned as well
        spec = self._specs[entry.key.kernel]
        config: Any = config_from_dict(spec.Config, entry.config)
        if not spec.is_legal(problem, config, self._device):
            config = spec.untuned(problem, self._device)
        if config is None:
            spec = self._specs[library_kernel(problem.op)]
            config = spec.untuned(problem, self._device)
        return pick_of(problem, spec, config, self._device)


def is_current(recipe: Recipe, specs: Sequence[KernelSpec], device: DeviceFingerprint) -> bool:
    """Whether a timed recipe's kernels are still those of today's code and toolchains, its ends among them if such run
    here."""
    by_name = {spec.name: spec for spec in specs}
    first = first_launch(recipe.group, recipe.dtype)
    has_first = with_ends(device) and is_served(first, specs, device)
    if has_first != any(pick.problem == first for pick in recipe.picks):
        return False
    return recipe.timed and all(
        pick.kernel in by_name and pick.key == tuning_key(by_name[pick.kernel], pick.problem, device).sha256
        for pick in recipe.picks
    )


def keep_recipe(search: ChainSearch, specs: Sequence[KernelSpec], device: DeviceFingerprint, store: Store) -> Recipe:
    """Keep the recipe found in place of the one there was, unless that is of today's kernels and was timed, and this is
    an estimate or slower. Either takes over the other's costs of smaller batches where it has none."""
    recipe = search.recipe()
    kept = store.recipe(device, recipe.group, recipe.dtype)
    if kept is not None and is_current(kept, specs, device):
        trial = store.chain_trial(chain_key(kept, device))
        kept_us = (trial.measurement.median_us if trial else kept.cost_us) or math.inf
        is_comparable = trial is not None or search.candidate is not None  # else another version of chains.py timed it
        is_slower = is_comparable and kept_us * FASTER < (recipe.cost_us or 0.0)
        best, other = (kept, recipe) if is_slower or not recipe.timed else (recipe, kept)
        costs = {**dict(other.batch_costs), **dict(best.batch_costs)}
        recipe = replace(best, batch_costs=tuple(sorted(costs.items())))
    if kept != recipe:
        store.put_recipe(device, recipe)
    return recipe
