"""Proposes one kernel's next configuration for one problem: Optuna's suggestion, snapped to an unseen legal one."""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.trial import TrialState

from dmuon_tune import space
from dmuon_tune.measurement import Measurement

STARTUP_TRIALS = 6  # random before the model: a kernel gets 10 to 40 trials, Optuna's default of 10 is most of them
RANDOM_SHARE = 0.2  # TPE alone stalls in a poor region for about one seed in ten

Point = np.ndarray[Any, np.dtype[np.float64]]


class Sampler:
    """Never proposes a configuration twice, nor one that is not in ``legal``; those in ``first`` come first.

    Each axis is ordinal: an index into its choices. The suggestion of a multivariate TPE over the indices is replaced
    by the nearest unseen legal configuration, by Euclidean distance with every axis scaled to 0..1.
    """

    def __init__(self, config_type: type, legal: list[Any], seed: int, first: Iterable[Any] = ()) -> None:
        self._axes = {name: values for name, values in space.axes(config_type).items() if len(values) > 1}
        self._unseen = {space.config_json(config): config for config in legal}
        self._first = deque(space.config_json(config) for config in first)
        self._points: dict[str, Point] = {}
        self._rng = random.Random(seed)
        self._seed = seed % 2**32  # the widest that Optuna's generator takes
        self._study: optuna.Study | None = None

    @property
    def unseen(self) -> int:
        """How many legal configurations were not proposed yet."""
        return len(self._unseen)

    def reserve(self, config: Any) -> bool:
        """Count a configuration as proposed; whether it was legal and not yet."""
        return self._unseen.pop(space.config_json(config), None) is not None

    def observe(self, config: Any, measurement: Measurement) -> None:
        """Learn a configuration's outcome, from this run or an earlier one; a failure is a failed trial."""
        self.reserve(config)
        if not self._axes:
            return
        state = TrialState.COMPLETE if measurement.ok else TrialState.FAIL
        self._get_study().add_trial(
            optuna.trial.create_trial(
                state=state,
                params=self._indices(config),
                distributions=self._distributions(),
                value=measurement.median_us if measurement.ok else None,
            )
        )

    def suggest(self, remaining: int) -> Any | None:
        """The next configuration, or None where none is left; in random order where all fit in ``remaining`` trials."""
        if not self._unseen:
            return None
        while self._first:
            text = self._first.popleft()
            if text in self._unseen:
                return self._unseen.pop(text)
        texts = list(self._unseen)
        if len(texts) <= remaining or self._rng.random() < RANDOM_SHARE:
            text = self._rng.choice(texts)
        else:
            offsets = np.stack([self._point(text) for text in texts]) - self._ask()
            text = texts[int((offsets**2).sum(axis=1).argmin())]
        return self._unseen.pop(text)

    def _ask(self) -> Point:
        study = self._get_study()
        trial = study.ask(self._distributions())
        # What is measured is the snapped configuration; observe() adds it, so this trial itself is none.
        study.tell(trial, state=TrialState.FAIL)
        return self._scaled([trial.params[name] for name in self._axes])

    def _point(self, text: str) -> Point:
        if text not in self._points:
            self._points[text] = self._scaled(list(self._indices(self._unseen[text]).values()))
        return self._points[text]

    def _indices(self, config: Any) -> dict[str, int]:
        return {name: values.index(getattr(config, name)) for name, values in self._axes.items()}

    def _scaled(self, indices: list[int]) -> Point:
        last = [len(values) - 1 for values in self._axes.values()]
        return np.array(indices, dtype=np.float64) / np.array(last, dtype=np.float64)

    def _distributions(self) -> dict[str, BaseDistribution]:
        return {name: IntDistribution(0, len(values) - 1) for name, values in self._axes.items()}

    def _get_study(self) -> optuna.Study:
        if self._study is None:
            optuna.logging.set_verbosity(optuna.logging.WARNING)  # else each of some hundred studies says a line
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # multivariate
                sampler = optuna.samplers.TPESampler(
                    seed=self._seed, multivariate=True, n_startup_trials=STARTUP_TRIALS
                )
            self._study = optuna.create_study(sampler=sampler)
        return self._study
