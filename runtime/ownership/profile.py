"""Times a model's own shapes on this machine, the work divided among the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

import torch

from dmuon_tune import checks
from dmuon_tune.measure.timing import time_warm
from dmuon_tune.recipe import MAX_BATCH_ELEMENTS, Group

from ..execution import Momentum
from ..newton_schulz import GramNewtonSchulz
from ..plan import device_context
from .assignment import assign
from .costs import Costs, Point
from .instance import Work
from .pricing import Timed, flops

MU = 0.95  # Muon's default


def batches(groups: Iterable[Group], owners: int, most_elements: int = MAX_BATCH_ELEMENTS) -> list[Group]:
    """What is to be timed of a model's ``groups`` that ``owners`` share: of each shape batches of 1, 2, 4 and so on, up
    to the first that is more than an owner gets, or to all that run at once (``most_elements``, or one matrix)."""
    checks.integer("owners", owners)
    totals: dict[tuple[int, int], int] = {}
    for group in groups:
        totals[group.rows, group.cols] = totals.get((group.rows, group.cols), 0) + group.batch
    found = []
    for (rows, cols), total in totals.items():
        most = min(total, max(1, min(most_elements, MAX_BATCH_ELEMENTS) // (rows * cols)))
        size = 1
        while size < most and size <= -(-total // owners):
            found.append(Group(size, rows, cols))
            size *= 2
        found.append(Group(min(size, most), rows, cols))
    return found


def shares(groups: Sequence[Group], ranks: int) -> list[list[Group]]:
    """Which of ``groups`` each rank times, about as many FLOPs each; a pure function of its arguments."""
    work = [Work(g.rows, g.cols, 0, Costs.of([Point(1, flops(g))]), 0) for g in groups]
    owner = assign(work, ranks, seconds=0.0).owner
    return [[group for group, its in zip(groups, owner, strict=True) if its == rank] for rank in range(ranks)]


def profile(
    groups: Iterable[Group], device: torch.device, chains: GramNewtonSchulz, dtype: torch.dtype
) -> list[Timed]:
    """Time each group's whole step of an owner on ``device``: from random gradients of ``dtype``, by Nesterov momentum
    and ``chains``, to polar factors of that dtype."""
    with device_context(device), chains.looking_up():
        return [Timed(group, _step_us(group, device, chains, dtype)) for group in groups]


def _step_us(group: Group, device: torch.device, chains: GramNewtonSchulz, dtype: torch.dtype) -> float:
    shape = group.batch, group.rows, group.cols
    gradients, momenta = (torch.randn(shape, device=device).to(dtype).unbind() for _ in range(2))
    polars, momentum = torch.empty(shape, dtype=dtype, device=device), Momentum("n", momenta, MU)
    return median(time_warm(lambda: chains.directions(gradients, momentum, polars), str(device)).samples_us)
