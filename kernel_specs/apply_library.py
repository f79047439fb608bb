"""``apply`` by the vendor library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem
from dmuon_tune.spec import KernelSpec

from ._library import LibraryConfig, illegality, product, refusal


def build(problem: Problem, config: LibraryConfig, device: DeviceFingerprint) -> Callable[..., Any]:
    multiply = product(config)

    def row(q: Tensor, x: Tensor, y: Tensor, alpha: float, beta: float = 0.0) -> None:
        multiply(x, q, x, y, alpha, beta)

    def col(q: Tensor, x: Tensor, y: Tensor, alpha: float, beta: float = 0.0) -> None:
        multiply(x, x, q.mT, y, alpha, beta)

    return row if problem.layout == "row" else col


KERNEL = KernelSpec(
    "apply", "library", LibraryConfig, refusal, build, (__name__, f"{__package__}._library"), illegality
)
