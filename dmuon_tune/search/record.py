"""Record: one kernel's measured space for one problem, from a cache or a compressed file, for replay."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dmuon_tune import space
from dmuon_tune.cache import Store, Trial, TuningKey
from dmuon_tune.errors import UsageError
from dmuon_tune.kernel_specs import kernels
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem

from .record_faults import faults
from .samplers import Floats, LegalSpace

FORMAT = 1
UNREADABLE = (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError, RecursionError)
HOW_TO_WRITE = "write one with 'dmuon-tune replay --export FILE'"


@dataclass(frozen=True)
class Record:
    """Everything that was measured of one kernel for one problem on one device.

    ``axes``: each axis's values in order; ``rows``: each configuration as places of its values; ``times_us``: its
    median, None where it failed; ``first``: the kernel's untuned configuration and seeds, as rows' numbers;
    ``compile_s`` and ``run_s``: how long it took to compile, and to verify and time, None where nobody knows.
    """

    problem: str
    kernel: str
    device: str
    axes: dict[str, list[Any]]
    rows: list[list[int]]
    times_us: list[float | None]
    first: list[int]
    compile_s: list[float | None] = field(default_factory=list)
    run_s: list[float | None] = field(default_factory=list)

    @property
    def has_costs(self) -> bool:
        """Whether it is known how long at least one configuration took."""
        return any(None not in both for both in zip(self.compile_s, self.run_s, strict=False))

    def costs_s(self, workers: int) -> Floats:
        """Seconds that each configuration adds to a run in which so many processes compile beside one that times; the
        median for one whose process died."""
        found = [
            math.nan if compile_s is None else compile_s / workers + (run_s or 0.0)
            for compile_s, run_s in zip(self.compile_s, self.run_s, strict=True)
        ]
        costs = np.array(found, dtype=np.float64)
        return np.where(np.isnan(costs), np.nanmedian(costs), costs)

    @property
    def best_us(self) -> float:
        return min(time_us for time_us in self.times_us if time_us is not None)

    @property
    def failures(self) -> int:
        return self.times_us.count(None)

    def legal_space(self) -> LegalSpace:
        """The recorded configurations alone: what was not measured cannot be picked."""
        return LegalSpace(tuple(map(tuple, self.axes.values())), np.array(self.rows, dtype=np.int64))

    def write(self, path: str | Path) -> None:
        """As gzipped JSON; equal records give equal bytes."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":"))
        try:
            Path(path).write_bytes(gzip.compress(text.encode(), mtime=0))
        except OSError as error:
            raise UsageError(
                f"cannot write the record {path}: {error.strerror}; name a file in a writable folder"
            ) from error

    @classmethod
    def read(cls, path: str | Path) -> Record:
        """UsageError for a file that is not a record of this format, cannot be read, or holds what cannot be."""
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read the record {path}: {error.strerror}; {HOW_TO_WRITE}") from error
        try:
            fields = json.loads(gzip.decompress(content))
            if fields.pop("format") != FORMAT:
                raise ValueError("another format")
            found = cls(**fields)
        except UNREADABLE as error:
            raise UsageError(f"{path} is no record of this version; {HOW_TO_WRITE}") from error
        wrong = next(faults(found), None)
        if wrong is not None:
            raise UsageError(f"{path} is a damaged record: {wrong}; {HOW_TO_WRITE}")
        return found


def records(store: Store, chosen: Callable[[Problem, str], bool]) -> list[Record]:
    """The record of every key whose problem and kernel are ``chosen``, largest first; none without an ok trial."""
    of_key: dict[TuningKey, list[Trial]] = defaultdict(list)
    for trial in store.all_trials():
        if chosen(trial.key.problem, trial.key.kernel):
            of_key[trial.key].append(trial)
    ok = [(key, trials) for key, trials in of_key.items() if any(trial.measurement.ok for trial in trials)]
    return [_record(key, trials) for key, trials in sorted(ok, key=lambda found: -len(found[1]))]


def _record(key: TuningKey, trials: Sequence[Trial]) -> Record:
    spec = next((spec for spec in kernels(key.problem.op) if spec.name == key.kernel), None)
    axes = _axes(spec.Config if spec else None, [trial.config for trial in trials])
    rows = [[values.index(trial.config[name]) for name, values in axes.items()] for trial in trials]
    first = []
    if spec is not None:
        configs = [spec.untuned(key.problem, key.device)]
        configs += spec.seeds(key.problem, key.device) if spec.seeds else ()
        likely = [space.config_to_dict(config) for config in configs if config is not None]
        place = {json.dumps(trial.config, sort_keys=True): row for row, trial in enumerate(trials)}
        texts = dict.fromkeys(json.dumps(config, sort_keys=True) for config in likely)
        first = [place[text] for text in texts if text in place]
    return Record(
        key.problem.label(), key.kernel, key.device.name, axes, rows,
        [_time_us(trial.measurement) for trial in trials], first,
        *([trial.measurement.resources.get(name) for trial in trials] for name in ("compile_s", "run_s")),
    )


def _time_us(measurement: Measurement) -> float | None:
    return None if measurement.median_us is None else round(measurement.median_us, 3)


def _axes(config_type: type | None, configs: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """The axes of today's kernel where every configuration fits into them, else the values found, in order."""
    if config_type is not None:
        axes = {name: list(values) for name, values in space.axes(config_type).items()}
        if all(
            set(config) == set(axes) and all(config[name] in axes[name] for name in axes) for config in configs
        ):
            return axes
    names = sorted({name for config in configs for name in config})
    return {
        name: sorted({config.get(name) for config in configs}, key=lambda value: (str(type(value)), value))
        for name in names
    }
