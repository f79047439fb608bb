"""Gathers what caches hold into one view for each device: products, chains, recipes and how trials ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dmuon_tune.backends import backends
from dmuon_tune.cache import CacheEntry, ChainTrial, Store, Trial, TuningKey
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernels, ops
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measure.standing import StaleOf, Winner, once_each, winners
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, Pick, Recipe
from dmuon_tune.space import config_to_dict


@dataclass(frozen=True)
class Contents:
    """All that one cache holds, as it was at one moment; ``label`` is its layer's."""

    label: str
    path: str
    trials: tuple[Trial, ...]
    entries: tuple[CacheEntry, ...]
    chains: tuple[ChainTrial, ...]
    recipes: tuple[tuple[DeviceFingerprint, Recipe], ...]


def read(label: str, path: str, store: Store) -> Contents:
    """Everything that a store holds, of every device."""
    trials, chains = tuple(store.all_trials()), tuple(store.chain_trials())
    devices = dict.fromkeys([*(trial.key.device for trial in trials), *(chain.device for chain in chains)])
    recipes = tuple((device, recipe) for device in devices for recipe in store.recipes(device))
    return Contents(label, path, trials, tuple(store.entries()), chains, recipes)


@dataclass(frozen=True)
class Product:
    """One problem in one layer: its winner (None: nothing ran), and ``attempts``, (kernel, outcome) in the order in
    which they were first recorded: those of today's code where the winner is of today's, else all.

    ``untuned_us`` is the winner's kernel with the configuration that it runs without tuning, None where that was not
    measured. ``flops`` and ``bytes_moved`` of a call are None where no op of this name is known.
    """

    layer: str
    problem: Problem
    winner: Winner | None
    attempts: tuple[tuple[str, Measurement], ...]
    untuned_us: float | None
    flops: int | None
    bytes_moved: int | None

    @property
    def best(self) -> Measurement | None:
        return None if self.winner is None else self.winner.entry.measurement

    @property
    def median_us(self) -> float | None:
        return None if self.best is None else self.best.median_us

    @property
    def library_us(self) -> float | None:
        return None if self.winner is None else self.winner.library_us

    @property
    def over_library(self) -> float | None:
        """How many times faster the winner is than the library."""
        return _ratio(self.library_us, self.median_us)

    @property
    def over_untuned(self) -> float | None:
        """How many times faster the winner is than its kernel untuned."""
        return _ratio(self.untuned_us, self.median_us)

    @property
    def intensity(self) -> float | None:
        """FLOPs a byte, symmetric products counted once, every operand moved once."""
        return self.flops / self.bytes_moved if self.flops and self.bytes_moved else None

    def rate(self, median_us: float | None) -> float | None:
        """FLOP/s of a call that takes ``median_us``."""
        return self.flops / median_us * 1e6 if self.flops and median_us else None


@dataclass(frozen=True)
class KeptRecipe:
    """A recipe in one layer; ``stale`` are its kernels that are of other code or toolchains than today's."""

    layer: str
    recipe: Recipe
    stale: tuple[str, ...]

    @property
    def rate(self) -> float | None:
        """FLOP/s of the whole chain, symmetric products counted once."""
        total = [(count, work_of(problem)[0]) for problem, count in self.recipe.products().items()]
        if not self.recipe.cost_us or any(flops is None for _, flops in total):
            return None
        return sum(count * (flops or 0) for count, flops in total) / self.recipe.cost_us * 1e6


@dataclass(frozen=True)
class DeviceReport:
    """All that the caches hold of one device model. ``wanted`` are the groups that the reader asked about."""

    device: DeviceFingerprint
    products: tuple[Product, ...]
    trials: tuple[tuple[str, Trial], ...]
    chains: tuple[tuple[str, ChainTrial], ...]
    recipes: tuple[KeptRecipe, ...]
    entries: tuple[CacheEntry, ...]
    wanted: tuple[Group, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.trials or self.chains or self.recipes)

    @cached_property
    def statuses(self) -> dict[str, Counter[str]]:
        """Kernel → how many of its trials ended in each status; whole chains stand as ``chain <form>``."""
        found: dict[str, Counter[str]] = {}
        for _, trial in self.trials:
            found.setdefault(trial.key.kernel, Counter())[trial.measurement.status] += 1
        for _, chain in self.chains:
            found.setdefault(f"chain {chain.recipe.form}", Counter())[chain.measurement.status] += 1
        return dict(sorted(found.items()))


def devices(contents: Sequence[Contents]) -> list[DeviceFingerprint]:
    """The device models that the caches hold results of, in the order of their first recording."""
    known = [trial.key.device for each in contents for trial in each.trials]
    return list(dict.fromkeys([*known, *(chain.device for each in contents for chain in each.chains)]))


def collect(
    contents: Sequence[Contents], device: DeviceFingerprint | None, wanted: Iterable[Group] = ()
) -> list[DeviceReport]:
    """A report for each device model that the caches know, or for ``device`` alone, which may be empty."""
    stale_of, groups = once_each(), tuple(dict.fromkeys(wanted))
    wanted_devices = devices(contents) if device is None else [device]
    return [_of_device(contents, each, groups, stale_of) for each in wanted_devices]


def _of_device(
    contents: Sequence[Contents], device: DeviceFingerprint, wanted: tuple[Group, ...], stale_of: StaleOf
) -> DeviceReport:
    trials = tuple((each.label, trial) for each in contents for trial in each.trials if trial.key.device == device)
    entries = [(each.label, entry) for each in contents for entry in each.entries if entry.key.device == device]
    chains = tuple((each.label, chain) for each in contents for chain in each.chains if chain.device == device)
    kept = [(each.label, recipe) for each in contents for owner, recipe in each.recipes if owner == device]
    today = _Today(device)
    recipes = tuple(KeptRecipe(label, recipe, today.stale_kernels(recipe)) for label, recipe in kept)
    products = _products(trials, winners(entries, stale_of), stale_of)
    return DeviceReport(device, products, trials, chains, recipes, tuple(entry for _, entry in entries), wanted)


def _products(
    trials: Sequence[tuple[str, Trial]], won: Sequence[Winner], stale_of: StaleOf
) -> tuple[Product, ...]:
    of_problem = {(winner.layer, winner.entry.key.problem): winner for winner in won}
    tried: dict[tuple[str, Problem], list[Trial]] = {}
    for label, trial in trials:
        tried.setdefault((label, trial.key.problem), []).append(trial)
    return tuple(
        _product(label, problem, of_problem.get((label, problem)), tried[label, problem], stale_of)
        for label, problem in sorted(tried, key=lambda place: (place[1], place[0]))
    )


def _product(
    label: str, problem: Problem, winner: Winner | None, tried: list[Trial], stale_of: StaleOf
) -> Product:
    if winner is not None and winner.stale is None:
        tried = [trial for trial in tried if stale_of(trial.key) is None]
    flops, bytes_moved = work_of(problem)
    attempts = tuple((trial.key.kernel, trial.measurement) for trial in tried)
    return Product(label, problem, winner, attempts, _untuned_us(winner, tried), flops, bytes_moved)


def _untuned_us(winner: Winner | None, tried: list[Trial]) -> float | None:
    if winner is None:
        return None
    key = winner.entry.key
    spec = next((spec for spec in kernels(key.problem.op) if spec.name == key.kernel), None)
    untuned = spec.untuned(key.problem, key.device) if spec else None
    fields = None if untuned is None else config_to_dict(untuned)
    found = (trial.measurement.median_us for trial in tried if trial.key == key and trial.config == fields)
    return next(found, None)


def work_of(problem: Problem) -> tuple[int | None, int | None]:
    """FLOPs and bytes of one call by its op; (None, None) for an op, or an epilogue of it, that is not known here."""
    op = ops().get(problem.op)
    try:
        return (None, None) if op is None else (op.flops(problem), op.bytes_moved(problem))
    except Exception:  # an op's own reading of an epilogue that another version wrote
        return None, None


class _Today:
    """The keys that kernels have today on one device; each kernel's sources are read once."""

    def __init__(self, device: DeviceFingerprint) -> None:
        self._device = device
        self._keys: dict[str, TuningKey | None] = {}

    def stale_kernels(self, recipe: Recipe) -> tuple[str, ...]:
        """The kernels of a recipe whose key is another one today."""
        return tuple(dict.fromkeys(pick.kernel for pick in recipe.picks if not self._is_current(pick)))

    def _is_current(self, pick: Pick) -> bool:
        if pick.kernel not in self._keys:
            self._keys[pick.kernel] = self._key(pick)
        key = self._keys[pick.kernel]
        return key is not None and replace(key, problem=pick.problem).sha256 == pick.key

    def _key(self, pick: Pick) -> TuningKey | None:
        spec = next((spec for spec in kernels(pick.problem.op) if spec.name == pick.kernel), None)
        if spec is None or spec.backend not in backends():
            return None
        try:
            return tuning_key(spec, pick.problem, self._device)
        except ModuleNotFoundError:  # its toolchain is not installed here
            return None


def _ratio(baseline: float | None, value: float | None) -> float | None:
    return baseline / value if baseline and value else None
