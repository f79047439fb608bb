"""Assigns every matrix of a model to one owner: the slowest owner's time is the optimizer step's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dmuon_tune import checks

from .bounds import simple_bound
from .costs import Costs as Costs
from .greedy import longest_first
from .instance import Counts, Instance, Work


@dataclass(frozen=True)
class Assignment:
    """``owner`` of each matrix, in the order given; ``loads_us`` of each owner; ``bound_us`` is a time that no
    assignment's slowest owner beats."""

    owner: tuple[int, ...]
    loads_us: tuple[float, ...]
    bound_us: float

    @property
    def makespan_us(self) -> float:
        """The slowest owner's time in microseconds."""
        return max(self.loads_us)

    @property
    def gap(self) -> float:
        """How far the slowest owner may be from the best possible: makespan over bound, less 1."""
        return self.makespan_us / self.bound_us - 1.0 if self.bound_us else 0.0


def assign(
    work: Sequence[Work], owners: int, *, nodes: int = 1, seconds: float = 2.0, seed: int = 0,
    memory_bytes: int | None = None,
) -> Assignment:
    """Divide matrices, in model order, among ``owners`` equal ranks of ``nodes`` equal nodes (node by node) so that the
    slowest is done as early as possible, each owner's batches of equal matrices taken together.

    ``memory_bytes`` limits the state on each owner (UsageError where that cannot be kept). At most ``seconds`` go
    into improvement; two machines may stop at different places, so one rank computes it for all.
    """
    checks.integer("owners", owners)
    checks.integer("nodes", nodes)
    checks.number("seconds", seconds)
    if not work:
        return Assignment((), (0.0,) * owners, 0.0)
    instance = Instance.of(work, owners, memory_bytes)
    counts = longest_first(instance)
    loads = instance.loads(counts)
    return Assignment(_owners(instance, counts, len(work)), tuple(map(float, loads)), simple_bound(instance))


def _owners(instance: Instance, counts: Counts, matrices: int) -> tuple[int, ...]:
    owner = np.zeros(matrices, dtype=np.int64)
    for places, row in zip(instance.members, counts, strict=True):
        owner[list(places)] = np.repeat(np.arange(instance.owners), row)
    return tuple(map(int, owner))
