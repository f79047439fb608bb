"""Op ``gram``: R = α·X·Xᵀ, the Gram matrix of a batch of m×k matrices (m ≤ k in practice, not required)."""

from __future__ import annotations

from torch import Tensor

from dmuon_tune.problem import ITEM_BYTES, Problem
from dmuon_tune.spec import Argument, OpSpec

from ._inputs import gaussian, generator, stored


def arguments(problem: Problem) -> tuple[Argument, ...]:
    """x: (batch, m, k) in ``row`` layout, (batch, k, m) in ``col``; r: (batch, m, m); alpha."""
    return (
        Argument("x", "input", stored(problem.batch, problem.m, problem.k, problem.layout), problem.dtype),
        Argument("r", "output", (problem.batch, problem.m, problem.m), problem.out_dtype),
        Argument("alpha", "scalar"),
    )


def reference(problem: Problem, x: Tensor, alpha: float) -> Tensor:
    """R in float64, shape (batch, m, m)."""
    wide = x.double() if problem.layout == "row" else x.double().mT
    return alpha * (wide @ wide.mT)


def make_inputs(problem: Problem, device: str, seed: int) -> tuple[Tensor, ...]:
    """Gaussian X scaled so that R's diagonal is near 1: singular values fill √(1 ± √(m/k)) (Marchenko–Pastur)."""
    shape = stored(problem.batch, problem.m, problem.k, problem.layout)
    return (gaussian(shape, problem.dtype, device, generator(device, seed), problem.k**-0.5),)


def flops(problem: Problem) -> int:
    """m²k multiply-adds, half of them by symmetry: m²k floating-point operations a matrix."""
    return problem.batch * problem.m * problem.m * problem.k


def bytes_moved(problem: Problem) -> int:
    per_matrix = problem.m * problem.k * ITEM_BYTES[problem.dtype] + problem.m**2 * ITEM_BYTES[problem.out_dtype]
    return problem.batch * per_matrix


OP = OpSpec("gram", "R = αXXᵀ", arguments, reference, make_inputs, flops, bytes_moved, symmetric_output=True)
