"""``gram`` by the vendor library: a full product, no use of symmetry."""

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

    def row(x: Tensor, r: Tensor, alpha: float) -> None:
        multiply(r, x, x.mT, r, alpha, 0.0)

    def col(x: Tensor, r: Tensor, alpha: float) -> None:
        multiply(r, x.mT, x, r, alpha, 0.0)

    return row if problem.layout == "row" else col


KERNEL = KernelSpec(
    "gram", "library", LibraryConfig, refusal, build, (__name__, f"{__package__}._library"), illegality
)
