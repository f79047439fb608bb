"""The master problem in HiGHS: the least number of owners, of given patterns, that hold all matrices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import NDArray

from .patterns import Pattern

TOLERANCE = 1e-6  # HiGHS's own is 1e-7
MIP_NODES = 500  # of one search for whole owners: a limit that is the same on every machine


class SolverError(Exception):
    """HiGHS did not solve what has a solution."""


@dataclass(frozen=True)
class Relaxed:
    """Fractions of owners: ``owners`` in all, of each pattern ``shares``; ``values`` are what a matrix of each class is
    worth in owners."""

    owners: float
    shares: NDArray[np.float64]
    values: NDArray[np.float64]


class _Silent(highspy.Highs):  # type: ignore[misc]
    """Prints nothing on stdout, where a command's results go: HiGHS would say its version while it is being made."""

    def enableCallbacks(self) -> None:
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()


class Master:
    """A covering program that grows by patterns; ``needed`` matrices of each class."""

    def __init__(self, needed: NDArray[np.int64], patterns: Iterable[Pattern]) -> None:
        self._model = _Silent()
        self._model.setOptionValue("output_flag", False)
        # Not by threads=1, which HiGHS refuses where the process used another number before.
        self._model.setOptionValue("parallel", "off")
        for count in needed:
            self._model.addRow(float(count), highspy.kHighsInf, 0, np.array([], dtype=np.int32), np.array([]))
        self.patterns: list[Pattern] = []
        for pattern in patterns:
            self.add(pattern)

    def add(self, pattern: Pattern) -> None:
        sizes = np.array(pattern, dtype=np.float64)
        rows = np.flatnonzero(sizes).astype(np.int32)
        self._model.addCol(1.0, 0.0, highspy.kHighsInf, len(rows), rows, sizes[rows])
        self.patterns.append(pattern)

    def solve(self) -> Relaxed:
        """By fractions of owners; the patterns must cover every class. SolverError where HiGHS fails."""
        self._model.run()
        status = self._model.getModelStatus()
        if status != highspy.HighsModelStatus.kOptimal:
            raise SolverError(f"HiGHS ended with {self._model.modelStatusToString(status)}")
        solution = self._model.getSolution()
        owners = float(self._model.getInfo().objective_function_value)
        return Relaxed(owners, np.array(solution.col_value), np.maximum(np.array(solution.row_dual), 0.0))

    def whole(self, owners: int, seconds: float, seed: int) -> NDArray[np.int64] | None:
        """How many owners take each pattern, at most ``owners`` in all; None where none was found in ``seconds``."""
        model = self._model
        for column in range(len(self.patterns)):
            model.changeColIntegrality(column, highspy.HighsVarType.kInteger)
            model.changeColBounds(column, 0.0, float(owners))
        for option, value in (
            ("time_limit", max(0.0, seconds)), ("mip_max_nodes", MIP_NODES), ("random_seed", seed % 2**31),
            ("objective_target", owners + TOLERANCE),
        ):
            model.setOptionValue(option, value)
        model.run()
        solution = model.getSolution()
        if not solution.value_valid or model.getInfo().objective_function_value > owners + TOLERANCE:
            return None
        chosen: NDArray[np.int64] = np.rint(np.array(solution.col_value)).astype(np.int64)
        return chosen
