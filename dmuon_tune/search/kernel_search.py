"""One kernel's search for one problem, continued from what the cache holds of it, and which kernels are searched."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from logging import getLogger
from typing import Any

from dmuon_tune.backends import backends
from dmuon_tune.cache import CacheEntry, Store, Trial, TuningKey
from dmuon_tune.cache.models import canonical
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.errors import NoLegalConfigError, UsageError
from dmuon_tune.kernel_specs import kernels
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measure.winners import Contender
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.space import config_json, config_to_dict
from dmuon_tune.spec import KernelSpec

from .neighbours import Neighbours
from .proposer import Proposer
from .samplers import DEFAULT, sampler_type

logger = getLogger(__name__)


@dataclass(frozen=True)
class How:
    """How every space is searched: ``sampler`` by its name, seeded by ``seed``, which may know what ``neighbours`` ran
    best."""

    neighbours: Neighbours
    sampler: str = DEFAULT
    seed: int = 0


class KernelSearch:
    """One kernel's search for one problem, continued from the trials that the cache holds under the current key."""

    def __init__(
        self, spec: KernelSpec, key: TuningKey, legal: list[Any], device: DeviceFingerprint, store: Store, how: How
    ) -> None:
        self.spec, self.key, self.legal_count = spec, key, len(legal)
        self.untuned = spec.untuned(key.problem, device)
        self.proposer = Proposer(
            spec.Config, legal, sampler_type(how.sampler), how.seed ^ zlib.crc32(key.canonical_json().encode()),
            first=lambda: self._likeliest(how.neighbours),
        )
        self.outcomes: list[tuple[Any, Measurement, Trial | None]] = []
        self._legal = legal
        self.refresh(store)

    @cached_property
    def _by_text(self) -> dict[str, Any]:
        return {config_json(config): config for config in self._legal}

    def _likeliest(self, neighbours: Neighbours) -> list[Any]:
        problem, device = self.key.problem, self.key.device
        own = self.spec.seeds(problem, device) if self.spec.seeds else ()
        return [self.untuned, *own, *neighbours.best(self.spec, problem, self.is_legal)]

    @property
    def needs_seed(self) -> bool:
        return all(config != self.untuned for config, _, _ in self.outcomes)

    def is_legal(self, config: Any) -> bool:
        return self.proposer.is_legal(config)

    def observe(self, config: Any, measurement: Measurement, trial: Trial | None = None) -> None:
        """``trial``: the cache's record, where the measurement is not this run's."""
        self.proposer.observe(config, measurement)
        self.outcomes.append((config, measurement, trial))

    def refresh(self, store: Store) -> list[Measurement]:
        """Take what the store holds now of each configuration; returns what this search did not know."""
        held = {canonical(trial.config): trial for trial in store.trials(self.key)}
        for place, (config, measurement, trial) in enumerate(self.outcomes):
            found = held.pop(config_json(config), None)
            self.outcomes[place] = config, found.measurement if found else measurement, trial
        new = [(self._by_text[text], trial) for text, trial in held.items() if text in self._by_text]
        for config, trial in new:
            self.observe(config, trial.measurement, trial)
        return [trial.measurement for _, trial in new]

    def contenders(self, provenance: dict[str, Any]) -> Iterator[Contender]:
        """The ok outcomes; ``provenance`` is this run's."""
        for config, measurement, trial in self.outcomes:
            if measurement.ok:
                origin = provenance if trial is None else {"date": trial.created_at}
                entry = CacheEntry(
                    self.key, config_to_dict(config), measurement, provenance.get("validation", ""), origin
                )
                yield Contender(entry, config == self.untuned)


def check_backends(names: Iterable[str] | None) -> None:
    """UsageError for a backend that there is not, or for a module of the user's that may have meant to use it."""
    unknown = [name for name in names or () if name not in backends()]
    if not unknown:
        return
    own = [spec.name for spec in kernels() if spec.backend == unknown[0]]  # or why a module does not import
    whose = f", of which kernel {own[0]} is, has no file in dmuon_tune/backends" if own else ""
    raise UsageError(f"unknown backend {unknown[0]!r}{whose}; choose among {', '.join(sorted(backends()))}")


def usable_kernels(
    device: DeviceFingerprint, chosen: Iterable[str] | None
) -> tuple[list[KernelSpec], dict[str, str]]:
    """(kernels, backend → why it is not available): those of the chosen backends (None: all) and the library's."""
    known = backends()
    wanted = set(known if chosen is None else chosen) | {"library"}
    reasons = {name: known[name].unavailable(device) for name in sorted(wanted)}
    unavailable = {name: reason for name, reason in reasons.items() if reason is not None}
    usable = [spec for spec in kernels() if spec.backend in wanted and spec.backend not in unavailable]
    _warn_of_homeless(tuple(spec for spec in kernels() if spec.backend not in known))
    return usable, unavailable


@cache
def _warn_of_homeless(specs: tuple[KernelSpec, ...]) -> None:
    for spec in specs:
        logger.warning(
            "kernel %s is left out: dmuon_tune/backends has no file for its backend %r; add one (CONTRIBUTING.md)",
            spec.name, spec.backend,
        )


def kernel_searches(
    problem: Problem, specs: Sequence[KernelSpec], device: DeviceFingerprint, store: Store, seed: int,
    sampler: str = DEFAULT, neighbours: Neighbours | None = None,
) -> list[KernelSearch]:
    """The search of each kernel that serves a problem; NoLegalConfigError without any."""
    how = How(neighbours or Neighbours(store, device), sampler, seed)
    found, refusals = [], []
    for spec in specs:
        if spec.op != problem.op:
            continue
        legal = spec.legal_space(problem, device)
        if legal:
            found.append(KernelSearch(spec, tuning_key(spec, problem, device), legal, device, store, how))
        else:
            refusals.append(f"{spec.name}: {spec.why_none(problem, device)}")
    if not found:
        raise NoLegalConfigError(
            f"no kernel can run {problem.label()} on {device.name}: {'; '.join(refusals) or 'none exists'}"
        )
    return found
