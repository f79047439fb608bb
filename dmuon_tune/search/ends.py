"""Searches what a step launches at a chain's ends, from what was found for the products that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dmuon_tune.cache import CacheEntry
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Pick, Recipe, first_launch, written
from dmuon_tune.space import config_from_dict, config_to_dict
from dmuon_tune.spec import KernelSpec

from .kernel_search import KernelSearch
from .problem_search import Candidate, ProblemSearch

FEWER_TRIALS = 2  # times fewer than a product's: the search starts near its best

Choice = tuple[str, dict[str, Any]]  # kernel, configuration


class EndSearch(ProblemSearch):
    """One end's search; ``like`` is that of the product that it stands for, None where there is none.

    Its fastest configuration that runs here comes first, and again whenever another becomes the fastest, so that what
    is measured of an end is no worse than what it would take over unmeasured. Untuned configurations follow, as far as
    the trials go.
    """

    is_end = True

    def __init__(
        self, problem: Problem, kernel_searches: list[KernelSearch], trials: int, like: ProblemSearch | None
    ) -> None:
        super().__init__(problem, kernel_searches, -(-trials // FEWER_TRIALS))
        self.like = like

    @property
    def planned(self) -> int:
        """How many configurations a run without a budget still measures."""
        legal = sum(each.legal_count for each in self.kernels)
        return 0 if self.is_settled else max(0, min(self.trials, legal) - self.known)

    def seeds(self) -> list[Candidate]:
        """None: an end never goes before a product."""
        return []

    def propose(self) -> Candidate | None:
        """The product's best, an untuned configuration, or what the samplers suggest."""
        if self._proposed >= self.trials or self.is_settled:
            return None
        candidate = self._inherited() or self._untuned()
        if candidate is None:
            return super().propose()
        self._proposed += 1
        return candidate

    def _inherited(self) -> Candidate | None:
        """The fastest configuration of ``like`` that is legal here, if it was not proposed yet."""
        own = {each.spec.name: each for each in self.kernels}
        for name, config in self.like.fastest() if self.like else ():
            if name in own and own[name].is_legal(config):
                return Candidate(self, own[name], config) if own[name].proposer.reserve(config) else None
        return None

    def _untuned(self) -> Candidate | None:
        for each in self.kernels:
            if each.proposer.reserve(each.untuned):
                return Candidate(self, each, each.untuned)
        return None


def end_picks(
    recipe: Recipe, last_picks: Iterable[Pick], winner: Callable[[Problem], CacheEntry | None],
    specs: Sequence[KernelSpec], device: DeviceFingerprint,
) -> tuple[Pick, ...]:
    """The kernels that a step launches at this recipe's ends; none where none serves the first launch.

    ``last_picks`` are the last products', by piece, ``winner`` is what was tuned of an end of the whole group. The last
    product's own kernel and configuration stand in for one that was not, as in training.
    """
    first = first_launch(recipe.group, recipe.dtype)
    untuned = ((spec, spec.untuned(first, device)) for spec in specs if spec.op == first.op)
    choices = [(spec.name, config_to_dict(config)) for spec, config in untuned if config is not None]
    begin = _pick(first, [*_tuned(winner(first)), *choices], specs, device)
    if begin is None:
        return ()
    found: list[Pick | None] = [begin]
    for last in last_picks:
        end = written(last.problem)
        if end != last.problem:
            found.append(_pick(end, [*_tuned(winner(end)), (last.kernel, last.config)], specs, device))
    return tuple(pick for pick in found if pick is not None)


def _tuned(entry: CacheEntry | None) -> list[Choice]:
    return [] if entry is None else [(entry.key.kernel, entry.config)]


def _pick(
    problem: Problem, choices: Iterable[Choice], specs: Sequence[KernelSpec], device: DeviceFingerprint
) -> Pick | None:
    """The first of the choices that is legal."""
    by_name = {spec.name: spec for spec in specs}
    for name, config in choices:
        spec = by_name[name]
        given = config_from_dict(spec.Config, config)
        if spec.is_legal(problem, given, device):
            return pick_of(problem, spec, given, device)
    return None


def pick_of(problem: Problem, spec: KernelSpec, config: Any, device: DeviceFingerprint) -> Pick:
    """This kernel and configuration for a product, under today's key."""
    return Pick(problem, spec.name, config_to_dict(config), tuning_key(spec, problem, device).sha256)
