"""``gemm_symmetric`` by the vendor library: a full product, γ added to the diagonal afterwards."""

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

    def launch(a: Tensor, b: Tensor, *rest: Any) -> None:
        c, d, scalars = (rest[0], rest[1], rest[2:]) if problem.has_c else (rest[0], rest[0], rest[1:])
        # A·B, not A·Bᵀ: equal for a symmetric B, but rounding's asymmetry grows along a chain of A·Bᵀ (9× in fp16).
        left, right = (a, b) if problem.layout == "row" else (a.mT, b.mT)
        multiply(c, left, right, d, scalars[0], scalars[1] if problem.has_c else 0.0)
        if problem.has_identity:
            d.diagonal(dim1=-2, dim2=-1).add_(scalars[-1])

    return launch


KERNEL = KernelSpec(
    "gemm_symmetric", "library", LibraryConfig, refusal, build, (__name__, f"{__package__}._library"), illegality
)
