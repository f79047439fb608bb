"""Assigns every matrix of a model to one owner: the slowest owner's time is the optimizer step's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dmuon_tune import checks
from dmuon_tune.errors import UsageError

from ..ownership_options import OwnershipOptions
from .instance import Instance, Work
from .solve import solve
from .spread import over_nodes, owners_of


@dataclass(frozen=True)
class Assignment:
    """``owner`` of each matrix, in the order given; ``loads_us`` of each owner; ``bound_us`` is a time that no
    assignment's slowest owner beats. ``method``: ``column generation``, ``local search`` (where that met the bound, or
    without HiGHS), ``longest first`` (without time) or ``even split`` (where that costs hardly more)."""

    owner: tuple[int, ...]
    loads_us: tuple[float, ...]
    bound_us: float
    method: str

    @property
    def makespan_us(self) -> float:
        """The slowest owner's time in microseconds."""
        return max(self.loads_us)

    @property
    def gap(self) -> float:
        """How far the slowest owner may be from the best possible: makespan over bound, less 1."""
        return max(0.0, self.makespan_us / self.bound_us - 1.0) if self.bound_us else 0.0


def assign(
    work: Sequence[Work], owners: int, *, nodes: int = 1, seconds: float = OwnershipOptions.seconds,
    seed: int = OwnershipOptions.seed, memory_bytes: int | None = OwnershipOptions.memory_bytes,
) -> Assignment:
    """Divide matrices, in model order, among ``owners`` equal ranks of ``nodes`` equal nodes (node by node) so that the
    slowest is done as early as possible, each owner's batches of equal matrices taken together; each shape evenly where
    that takes the slowest at most 1 % longer.

    ``memory_bytes`` limits the state on each owner (UsageError where that cannot be kept). At most about ``seconds`` go
    into improvement. With the time that all passes take the same seed gives the same result; a slower machine may stop
    elsewhere, so one rank computes it for all.
    """
    _check(owners, nodes, seconds, seed)
    if not work:
        return Assignment((), (0.0,) * owners, 0.0, "longest first")
    instance = Instance.of(work, owners, memory_bytes)
    solution = solve(instance, seconds, seed)
    counts = over_nodes(instance, solution.counts, nodes)
    owner = owners_of(instance, counts, [item.layer for item in work], nodes)
    loads = instance.loads(counts)
    return Assignment(tuple(owner.tolist()), tuple(loads.tolist()), solution.bound_us, solution.method)


def _check(owners: int, nodes: int, seconds: float, seed: int) -> None:
    checks.integer("owners", owners)
    checks.integer("nodes", nodes)
    checks.number("seconds", seconds)
    checks.number("seed", seed)
    if owners % nodes:
        raise UsageError(f"{owners} owners cannot lie on {nodes} equal nodes; give a divisor")
