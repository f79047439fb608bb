"""Op ``gemm_symmetric``: D = α·A·Bᵀ + β·C + γ·I with D known to be symmetric (A and B symmetric and commuting)."""

from __future__ import annotations

import torch
from torch import Tensor

from dmuon_tune.problem import ITEM_BYTES, Problem
from dmuon_tune.spec import Argument, OpSpec

from ._inputs import commuting_symmetric, stored


def arguments(problem: Problem) -> tuple[Argument, ...]:
    """a, b: (batch, m, k) in ``row`` layout, (batch, k, m) in ``col``; c (epilogue c) and d: (batch, m, m).

    Scalars: alpha; beta where there is a c; gamma where there is an i.
    """
    operand = stored(problem.batch, problem.m, problem.k, problem.layout)
    square = (problem.batch, problem.m, problem.m)
    c = (Argument("c", "input", square, problem.dtype),) if problem.has_c else ()
    beta = (Argument("beta", "scalar"),) if problem.has_c else ()
    gamma = (Argument("gamma", "scalar"),) if problem.has_identity else ()
    return (
        Argument("a", "input", operand, problem.dtype),
        Argument("b", "input", operand, problem.dtype),
        *c,
        Argument("d", "output", square, problem.out_dtype),
        Argument("alpha", "scalar"),
        *beta,
        *gamma,
    )


def reference(problem: Problem, a: Tensor, b: Tensor, *rest: Tensor | float) -> Tensor:
    """D in float64, shape (batch, m, m); ``rest`` is c (if any), alpha, beta (if any), gamma (if any)."""
    c, scalars = (rest[0], list(rest[1:])) if problem.has_c else (None, list(rest))
    a64, b64 = (a.double(), b.double()) if problem.layout == "row" else (a.double().mT, b.double().mT)
    result = scalars.pop(0) * (a64 @ b64.mT)
    if isinstance(c, Tensor):
        result = result + scalars.pop(0) * c.double()
    if problem.has_identity:
        result = result + scalars.pop(0) * torch.eye(problem.m, dtype=torch.float64, device=a.device)
    return result


def make_inputs(problem: Problem, device: str, seed: int) -> tuple[Tensor, ...]:
    """Exactly commuting symmetric matrices with spectral radius up to 1."""
    if problem.k != problem.m:
        raise ValueError("gemm_symmetric inputs are square: k must equal m")
    return tuple(commuting_symmetric(problem, 3 if problem.has_c else 2, device, seed))


def flops(problem: Problem) -> int:
    """Symmetric result counted once: m²k floating-point operations a matrix."""
    return problem.batch * problem.m * problem.m * problem.k


def bytes_moved(problem: Problem) -> int:
    square = problem.m**2
    reads = 2 * problem.m * problem.k + (square if problem.has_c else 0)
    return problem.batch * (reads * ITEM_BYTES[problem.dtype] + square * ITEM_BYTES[problem.out_dtype])


OP = OpSpec(
    "gemm_symmetric", "D = αABᵀ + βC + γI, D symmetric", arguments, reference, make_inputs, flops, bytes_moved,
    symmetric_output=True,
)
