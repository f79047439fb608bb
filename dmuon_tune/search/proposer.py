"""Proposes one kernel's configurations for one problem, each legal one at most once, in a sampler's order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from dmuon_tune import space
from dmuon_tune.measurement import Measurement

from .asked import AskedSampler
from .samplers import LegalSpace, Sampler


class Proposer:
    """``first`` gives the likeliest configurations, best first; it is asked at the first proposal alone."""

    def __init__(
        self,
        config_type: type,
        legal: Sequence[Any],
        sampler: type[Sampler],
        seed: int,
        first: Callable[[], Iterable[Any]] = tuple,
    ) -> None:
        self._config_type, self._legal = config_type, legal
        self._rows = {config: row for row, config in enumerate(legal)}
        self._is_unseen = np.ones(len(legal), dtype=bool)
        self._known: list[tuple[int, float | None]] = []  # what was learned before the first proposal
        self._sampler_type, self._seed, self._first = sampler, seed % 2**64, first

    @property
    def unseen(self) -> int:
        """How many legal configurations were not proposed yet."""
        return int(self._is_unseen.sum())

    def is_legal(self, config: Any) -> bool:
        return config in self._rows

    def reserve(self, config: Any) -> bool:
        """Count a configuration as proposed; whether it was legal and not yet."""
        row = self._rows.get(config)
        if row is None or not self._is_unseen[row]:
            return False
        self._is_unseen[row] = False
        return True

    def observe(self, config: Any, measurement: Measurement) -> None:
        """Learn a configuration's outcome, from this run or an earlier one."""
        self.reserve(config)
        outcome = self._rows[config], measurement.median_us
        if "_sampler" in self.__dict__:
            self._sampler.observe(*outcome)
        else:
            self._known.append(outcome)

    def propose(self) -> Any | None:
        """The next configuration, or None where none is left; UsageError where the sampler fails at it."""
        return self._legal[self._sampler.pick(self._is_unseen)] if self.unseen else None

    @cached_property
    def _sampler(self) -> AskedSampler:
        """Made when it is first needed: most searches of a continued run propose nothing."""
        first = [self._rows[config] for config in self._first() if config in self._rows]
        made = AskedSampler(self._sampler_type, legal_space(self._config_type, self._legal), self._seed, first)
        for row, time_us in self._known:
            made.observe(row, time_us)
        return made


def legal_space(config_type: type, legal: Sequence[Any]) -> LegalSpace:
    """Configurations as the samplers see them."""
    axes = space.axes(config_type)
    places = [(name, {value: place for place, value in enumerate(values)}) for name, values in axes.items()]
    indices = [[place[getattr(config, name)] for name, place in places] for config in legal]
    return LegalSpace(tuple(axes.values()), np.array(indices, dtype=np.int64).reshape(len(legal), len(axes)))
