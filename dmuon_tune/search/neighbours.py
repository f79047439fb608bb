"""What was tuned before, for other shapes and by others: the best configurations of the nearest, to be tried first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from dmuon_tune.cache import CacheEntry, Layers, Store, TuningKey
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem, distance, same_code
from dmuon_tune.space import config_from_dict
from dmuon_tune.spec import KernelSpec

TOP = 3  # configurations that are taken over


class Neighbours:
    """What ``store`` holds as tuned now, and the ``layers`` that training reads besides, for any device of this
    architecture and any version of a kernel."""

    def __init__(self, store: Store, device: DeviceFingerprint, layers: Layers | None = None) -> None:
        self._store, self._arch, self._layers = store, device.arch, layers
        self._keys = [entry.key for entry in store.entries() if entry.key.device.arch == device.arch]

    @cached_property
    def _elsewhere(self) -> list[CacheEntry]:
        """Read when a search first asks: a layer may hold thousands."""
        known = {key.sha256 for key in self._keys}
        found = self._layers.entries(None, None) if self._layers else []
        return [
            entry for _, entry in found if entry.key.device.arch == self._arch and entry.key.sha256 not in known
        ]

    def best(self, spec: KernelSpec, problem: Problem, is_legal: Callable[[Any], bool]) -> list[Any]:
        """The fastest configurations of this kernel for the nearest shape, then for the next ones: TOP that are legal.

        The problem itself is the nearest where other layers hold it: by another toolchain, or another version.
        """
        found: dict[Any, None] = {}
        for fields in self._nearest_first(spec.name, problem):
            try:
                config = config_from_dict(spec.Config, fields)
            except ValueError:  # of a version of this kernel with other fields
                continue
            if is_legal(config):
                found[config] = None
            if len(found) == TOP:
                break
        return list(found)

    def _nearest_first(self, kernel: str, problem: Problem) -> Iterator[dict[str, Any]]:
        def is_near(key: TuningKey) -> bool:
            return key.kernel == kernel and same_code(key.problem, problem)

        near: dict[Problem, tuple[list[TuningKey], list[CacheEntry]]] = {}
        for key in self._keys:
            if is_near(key) and key.problem != problem:
                near.setdefault(key.problem, ([], []))[0].append(key)
        for entry in self._elsewhere:
            if is_near(entry.key):
                near.setdefault(entry.key.problem, ([], []))[1].append(entry)
        for other in sorted(near, key=lambda other: distance(other, problem)):
            keys, entries = near[other]
            results = [*entries, *(trial for key in keys for trial in self._store.trials(key))]
            ok = [result for result in results if result.measurement.ok]
            for result in sorted(ok, key=lambda result: result.measurement.median_us or math.inf):
                yield result.config
