"""The problem as the solvers see it: classes of equal matrices, and a table of counts by class and owner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmuon_tune.errors import UsageError
from dmuon_tune.words import counted

from .costs import Costs

Counts = NDArray[np.int64]  # (classes, owners): how many matrices of each class each owner holds


@dataclass(frozen=True)
class Work:
    """One matrix: ``layer`` is its block's place in the model, ``costs`` are those of its shape on the owners' device,
    ``state_bytes`` what its owner keeps of it."""

    rows: int
    cols: int
    layer: int
    costs: Costs
    state_bytes: int


@dataclass(frozen=True)
class Instance:
    """Classes of interchangeable matrices for ``owners`` equal owners.

    ``members`` are each class's matrices by place; ``table[s, k]`` is the time of k of class s in microseconds (inf
    beyond the class's count), ``state_bytes[s]`` one's state, ``memory_bytes`` an owner's limit (None: none).
    """

    members: tuple[tuple[int, ...], ...]
    table: NDArray[np.float64]
    state_bytes: NDArray[np.int64]
    owners: int
    memory_bytes: int | None

    @classmethod
    def of(cls, work: Sequence[Work], owners: int, memory_bytes: int | None) -> Instance:
        # Costs are long: they are compared once for each object, not for each matrix.
        known = {id(item.costs): item.costs for item in work}
        equal = {costs: costs for costs in known.values()}
        one_of = {place: equal[costs] for place, costs in known.items()}
        classes: dict[Any, list[int]] = {}
        priced: dict[Any, Costs] = {}
        for place, item in enumerate(work):
            costs = one_of[id(item.costs)]
            key = item.rows, item.cols, id(costs), item.state_bytes
            classes.setdefault(key, []).append(place)
            priced[key] = costs
        # In an order of their own: batches of owners do not depend on the matrices' order, which tools may not know.
        classes = dict(sorted(classes.items(), key=lambda known: (known[0][0], known[0][1], known[0][3]), reverse=True))
        table = np.full((len(classes), max(map(len, classes.values())) + 1), np.inf)
        for index, (key, places) in enumerate(classes.items()):
            table[index, : len(places) + 1] = [priced[key].us(batch) for batch in range(len(places) + 1)]
        state_bytes = np.array([key[3] for key in classes], dtype=np.int64)
        found = cls(tuple(map(tuple, classes.values())), table, state_bytes, owners, memory_bytes)
        found._check_memory()
        return found

    @property
    def counts(self) -> NDArray[np.int64]:
        """Matrices of each class."""
        return np.array([len(places) for places in self.members], dtype=np.int64)

    @property
    def longest_first(self) -> list[int]:
        """The classes by the time of one matrix."""
        return [int(kind) for kind in np.argsort(-self.table[:, 1], kind="stable")]

    def fits(self, pattern: NDArray[np.int64]) -> bool:
        """Whether an owner's memory holds so many matrices of each class."""
        return self.memory_bytes is None or int(self.state_bytes @ pattern) <= self.memory_bytes

    def time(self, pattern: Sequence[int] | NDArray[np.int64]) -> float:
        """What an owner of so many matrices of each class takes, in microseconds."""
        return float(self.table[np.arange(len(pattern)), pattern].sum())

    def loads(self, counts: Counts) -> NDArray[np.float64]:
        """Each owner's time in microseconds."""
        loads: NDArray[np.float64] = np.take_along_axis(self.table, counts, axis=1).sum(axis=0)
        return loads

    def memory(self, counts: Counts) -> NDArray[np.int64]:
        """The state of each owner in bytes."""
        held: NDArray[np.int64] = self.state_bytes @ counts
        return held

    def _check_memory(self) -> None:
        if self.memory_bytes is None:
            return
        largest, total = int(self.state_bytes.max()), int(self.state_bytes @ self.counts)
        if largest > self.memory_bytes:
            raise UsageError(
                f"one matrix's state is {counted(largest, 'byte')}, an owner's limit {self.memory_bytes}; raise it"
            )
        if total > self.owners * self.memory_bytes:
            raise UsageError(
                f"the matrices' state is {counted(total, 'byte')}, {counted(self.owners, 'owner')} of "
                f"{self.memory_bytes} hold {self.owners * self.memory_bytes}; raise the limit or take more owners"
            )
