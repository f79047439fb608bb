"""A chain's whole space: every combination of pieces and of its products' fastest configurations, for a record."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dmuon_tune.cache import CacheEntry, Store
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.errors import UsageError
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, Recipe, chain, forms
from dmuon_tune.spec import KernelSpec

from .kernel_search import usable_kernels
from .options import TuneOptions
from .plan import searches_of
from .recipes import ChainSearch, Role, Tuned, chunks, estimates
from .record import Record


class ChainSpace(ChainSearch):
    """Asks for every chain of one form, as :class:`ChainSearch` asks for the next; ``choices`` are each product's
    configurations, the winner first."""

    def __init__(
        self, recipe: Recipe, choices: Mapping[Role, Sequence[CacheEntry]], tuned: Mapping[Problem, Tuned],
        specs: Sequence[KernelSpec], device: DeviceFingerprint,
    ) -> None:
        pieces = [None, *chunks(recipe.group, recipe.form, recipe.dtype, device.l2_bytes)]
        self._choices, self._pieces = choices, pieces
        self._outcomes: list[Measurement] = []
        super().__init__([recipe], tuned, specs, device)

    @property
    def size(self) -> int:
        """How many chains there are."""
        return len(list(self._places()))

    def _places(self) -> itertools.product[tuple[int, ...]]:
        return itertools.product(range(len(self._pieces)), *(range(len(found)) for found in self._choices.values()))

    def _walk(self) -> Generator[Recipe, Measurement, None]:
        bare = replace(self._estimated[0], cost_us=None)
        for piece, *places in self._places():
            picked = {role: found[place] for (role, found), place in zip(self._choices.items(), places, strict=True)}
            recipe = replace(bare, chunk=self._pieces[piece])
            self._outcomes.append((yield replace(recipe, picks=self._picks(recipe, picked))))

    def record(self, device: str) -> Record:
        """What was timed so far; not how long each chain took to compile, which the chains before it decide."""
        recipe = self._estimated[0]
        axes: dict[str, list[Any]] = {"pieces of": [chunk or recipe.group.batch for chunk in self._pieces]}
        for (op, epilogue), found in self._choices.items():
            axes[f"{op} {epilogue}"] = [f"{entry.key.kernel} {entry.config}" for entry in found]
        rows = [list(place) for place in itertools.islice(self._places(), len(self._outcomes))]
        times_us = [outcome.median_us and round(outcome.median_us, 3) for outcome in self._outcomes]
        label = f"chain {recipe.group.label()} {recipe.dtype}"
        return Record(label, f"chain.{recipe.form}", device, axes, rows, times_us, [0] if rows else [])


def chain_space(
    group: Group, dtype: str, form: str | None, top: int, device: DeviceFingerprint, store: Store
) -> ChainSpace:
    """The space of a group's chain in one form (None: that of the least sum) by the ``top`` fastest configurations that
    the store holds of each product; UsageError where it holds too little."""
    specs, _ = usable_kernels(device, None)
    searches = {each.problem: each for each in searches_of([group], dtype, specs, device, store, TuneOptions())}
    tuned = {problem: Tuned(best) for problem, each in searches.items() if (best := each.winner({})) is not None}
    recipes = estimates(group, [form] if form else forms(group, dtype), dtype, tuned)
    if not recipes:
        raise UsageError(
            f"the cache has no result for some product of {group.label()} in {dtype}; first run: dmuon-tune tune "
            f"--shapes {group.label()} --dtype {dtype} with this cache"
        )
    choices: dict[Role, Sequence[CacheEntry]] = {}
    for problem in chain(group, recipes[0].form, dtype):
        best = tuned[problem].winner
        ranked = sorted(searches[problem].contenders({}), key=lambda each: each.median_us)
        others = [each.entry for each in ranked if (each.entry.key, each.entry.config) != (best.key, best.config)]
        choices[problem.op, problem.epilogue] = [best, *others][:top]
    return ChainSpace(recipes[0], choices, tuned, specs, device)
