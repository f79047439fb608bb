"""What was tuned before for other shapes: the best configurations of the nearest one, to be tried first."""

from __future__ import annotations

from typing import Any

from dmuon_tune.cache import Store
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem, distance, same_code
from dmuon_tune.space import config_from_dict
from dmuon_tune.spec import KernelSpec

TOP = 3  # configurations that are taken over


class Neighbours:
    """The shapes that ``store`` holds as tuned now, for any device of this architecture."""

    def __init__(self, store: Store, device: DeviceFingerprint) -> None:
        self._store = store
        self._keys = [entry.key for entry in store.entries() if entry.key.device.arch == device.arch]

    def best(self, spec: KernelSpec, problem: Problem) -> list[Any]:
        """The fastest configurations of this kernel, whatever version of it, for the nearest other shape."""
        near = [
            key for key in self._keys
            if key.kernel == spec.name and key.problem != problem and same_code(key.problem, problem)
        ]
        if not near:
            return []
        key = min(near, key=lambda key: distance(key.problem, problem))
        ok = [trial for trial in self._store.trials(key) if trial.measurement.median_us is not None]
        found = []
        for trial in sorted(ok, key=lambda trial: trial.measurement.median_us or 0.0)[:TOP]:
            try:
                found.append(config_from_dict(spec.Config, trial.config))
            except ValueError:  # of a version of this kernel with other fields
                return []
        return found
