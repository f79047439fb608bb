"""Merges and compares caches' contents: of two outcomes of one thing the better stays, whichever came first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dmuon_tune.measurement import Measurement

from .chains import ChainTrial
from .contents import Contents, KeptRecipe
from .models import IMPORTED, canonical
from .results import Trial

Kept = TypeVar("Kept", Trial, KeptRecipe, ChainTrial)


@dataclass(frozen=True)
class Conflict:
    """Where two caches differ: ``about`` what, what stays (or the first one has) and what does not (the second one);
    empty where one has nothing."""

    about: str
    device: str
    kept: str
    other: str


def merged(caches: Sequence[Contents]) -> Contents:
    """The union, in the order of first occurrence; the same set in whatever order the caches come.

    Ok beats a failure, undisturbed beats disturbed, raced beats screened and faster beats slower; of recipes the timed
    and cheaper one stays.
    """
    return Contents(
        tuple(_best_of_each(result for cache in caches for result in cache.results)),
        tuple(_best_of_each(recipe for cache in caches for recipe in cache.recipes)),
        tuple(_best_of_each(chain for cache in caches for chain in cache.chains)),
    )


def gains(kept: Contents, incoming: Contents) -> Contents:
    """What of ``incoming`` is new to ``kept``, or better than what it has."""
    return Contents(
        tuple(_better_or_new(kept.results, incoming.results)),
        tuple(_better_or_new(kept.recipes, incoming.recipes)),
        tuple(_better_or_new(kept.chains, incoming.chains)),
    )


def conflicts(caches: Sequence[Contents]) -> list[Conflict]:
    """Where caches that have the same key, configuration or group do not agree, with what the union keeps of it."""
    found: dict[Conflict, None] = {}
    union = merged(caches)
    for cache in caches:
        for conflict in differences(union, cache):
            if conflict.other and conflict.kept:
                found.setdefault(conflict)
    return list(found)


def differences(first: Contents, second: Contents) -> Iterator[Conflict]:
    """Winners of one key, outcomes of one configuration and recipes of one group that differ, and those that one of the
    two has alone; times that differ by noise do not."""
    theirs = {winner.key.sha256: winner for winner in second.winners}
    ours = {winner.key.sha256: winner for winner in first.winners}
    for key in dict.fromkeys((*ours, *theirs)):
        one, two = ours.get(key), theirs.get(key)
        if one is None or two is None or one.config != two.config:
            yield _conflict(one, two)
    failed = {result.identity: result for result in second.results}
    for result in first.results:
        other = failed.get(result.identity)
        if other is not None and other.measurement.ok != result.measurement.ok:
            yield _conflict(result, other)
    recipes = {kept.identity: kept for kept in second.recipes}
    mine = {kept.identity: kept for kept in first.recipes}
    for identity in dict.fromkeys((*mine, *recipes)):
        here, there = mine.get(identity), recipes.get(identity)
        if here is None or there is None or _way(here) != _way(there):
            known = here or there
            assert known is not None
            about = f"recipe {known.recipe.group.label()} {known.recipe.dtype}"
            yield Conflict(about, known.device.name, _recipe_text(here), _recipe_text(there))


def _conflict(one: Trial | None, two: Trial | None) -> Conflict:
    known = one or two
    assert known is not None
    about = f"{known.key.problem.label()} {known.key.kernel}"
    return Conflict(about, known.key.device.name, _result_text(one), _result_text(two))


def _result_text(result: Trial | None) -> str:
    if result is None:
        return ""
    config = " ".join(f"{name}={value}" for name, value in result.config.items())
    outcome = result.measurement
    return f"{config} {outcome.status if outcome.median_us is None else f'{outcome.median_us:.4g} us'}".strip()


def _way(kept: KeptRecipe) -> dict[str, Any]:
    """How a recipe runs, whatever it costs."""
    return replace(kept.recipe, cost_us=None, p20_us=None, p80_us=None, batch_costs=()).to_dict()


def _recipe_text(kept: KeptRecipe | None) -> str:
    if kept is None:
        return ""
    recipe = kept.recipe
    cost = "" if recipe.cost_us is None else f" {recipe.cost_us:.4g} us"
    picks = "" if not recipe.picks else " by " + " ".join(dict.fromkeys(pick.kernel for pick in recipe.picks))
    return f"{recipe.form} in {len(recipe.pieces)}{picks}{cost}"


def _best_of_each(every: Iterable[Kept]) -> Iterable[Kept]:
    best: dict[tuple[str, ...], Kept] = {}
    for kept in every:
        known = best.setdefault(kept.identity, kept)
        if known is not kept and _rank(kept) < _rank(known):
            best[kept.identity] = kept
    return best.values()


def _better_or_new(known: Iterable[Kept], incoming: Iterable[Kept]) -> Iterator[Kept]:
    held = {kept.identity: kept for kept in known}
    for kept in incoming:
        if kept.identity not in held or _rank(kept) < _rank(held[kept.identity]):
            yield kept


def _rank(kept: Trial | KeptRecipe | ChainTrial) -> tuple[Any, ...]:
    """Less is better; equal only where nothing but the time and the way of coming here differs."""
    if isinstance(kept, KeptRecipe):
        recipe, cost_us = kept.recipe, kept.recipe.cost_us
        cost_us = math.inf if cost_us is None else cost_us
        return not recipe.timed, cost_us, canonical(recipe.to_dict())
    imported = isinstance(kept, Trial) and kept.imported is not None
    how = {name: value for name, value in kept.provenance.items() if name != IMPORTED}
    return *_outcome_rank(kept.measurement), imported, canonical([kept.measurement.to_dict(), how])


def _outcome_rank(measurement: Measurement) -> tuple[Any, ...]:
    return not measurement.ok, measurement.disturbed, measurement.place is None, measurement.median_us or 0.0
