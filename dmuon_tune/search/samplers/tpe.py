"""``tpe``: Optuna's multivariate TPE, each suggestion snapped to the nearest unseen legal configuration."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from . import Ints, LegalSpace, Sampler

if TYPE_CHECKING:
    from optuna import Study

STARTUP_TRIALS = 6  # random before the model: a kernel gets 10 to 40 trials, Optuna's default of 10 is most of them


class TpeSampler(Sampler):
    """Axes are ordinal: indices into their choices. Near is by Euclidean distance with every axis scaled to 0..1."""

    name = "tpe"
    summary = "multivariate TPE, snapped to the nearest unseen configuration"

    def __init__(self, space: LegalSpace, seed: int, first: Sequence[int] = ()) -> None:
        super().__init__(space, seed, first)
        self._axes = [axis for axis, levels in enumerate(space.levels) if levels > 1]  # one value needs no model
        self._study = _study(int(self.rng.integers(2**32)))

    def observe(self, row: int, time_us: float | None) -> None:
        """A failure is a failed trial, which the model does not learn from."""
        from optuna.distributions import IntDistribution
        from optuna.trial import TrialState, create_trial

        super().observe(row, time_us)
        self._study.add_trial(
            create_trial(
                state=TrialState.FAIL if time_us is None else TrialState.COMPLETE,
                params={str(axis): int(self.space.indices[row, axis]) for axis in self._axes},
                distributions={str(axis): IntDistribution(0, self.space.levels[axis] - 1) for axis in self._axes},
                value=time_us,
            )
        )

    def choose(self, unseen: Ints) -> int:
        from optuna.trial import TrialState

        trial = self._study.ask()
        asked = [trial.suggest_int(str(axis), 0, self.space.levels[axis] - 1) for axis in self._axes]
        # What is measured is the snapped configuration; observe() adds it, so this trial itself is none.
        self._study.tell(trial, state=TrialState.FAIL)
        wanted = np.array(asked) / (np.array(self.space.levels)[self._axes] - 1)
        offsets = self.space.points[unseen][:, self._axes] - wanted
        return int(unseen[(offsets**2).sum(axis=1).argmin()])


def _study(seed: int) -> Study:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)  # else each of some hundred studies says a line
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # multivariate
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=STARTUP_TRIALS)
    return optuna.create_study(sampler=sampler)


SAMPLER = TpeSampler
