"""Op ``apply``: Y = α·Q·X (+ β·X), an m×m factor applied to a batch of m×n matrices."""

from __future__ import annotations

from torch import Tensor

from dmuon_tune.problem import ITEM_BYTES, Problem
from dmuon_tune.spec import Argument, OpSpec

from ._inputs import gaussian, generator, stored


def arguments(problem: Problem) -> tuple[Argument, ...]:
    """q: (batch, m, m); x, y: (batch, m, n) in ``row`` layout, (batch, n, m) in ``col``; alpha; beta with epilogue c.

    Q need not be symmetric. The βX term reads x again: epilogue ``c`` takes no further tensor.
    """
    matrix = stored(problem.batch, problem.m, problem.n, problem.layout)
    return (
        Argument("q", "input", (problem.batch, problem.m, problem.m), problem.dtype),
        Argument("x", "input", matrix, problem.dtype),
        Argument("y", "output", matrix, problem.out_dtype),
        Argument("alpha", "scalar"),
        *((Argument("beta", "scalar"),) if problem.has_c else ()),
    )


def reference(problem: Problem, q: Tensor, x: Tensor, alpha: float, beta: float = 0.0) -> Tensor:
    """Y in float64, stored as x is."""
    product = q.double() @ x.double() if problem.layout == "row" else x.double() @ q.double().mT
    return alpha * product + beta * x.double()


def make_inputs(problem: Problem, device: str, seed: int) -> tuple[Tensor, ...]:
    """Gaussian Q (asymmetric, so that a transposed Q shows) with spectral radius near 1, and Gaussian X."""
    rng = generator(device, seed)
    q = gaussian((problem.batch, problem.m, problem.m), problem.dtype, device, rng, problem.m**-0.5)
    return q, gaussian(stored(problem.batch, problem.m, problem.n, problem.layout), problem.dtype, device, rng)


def flops(problem: Problem) -> int:
    return 2 * problem.batch * problem.m * problem.m * problem.n


def bytes_moved(problem: Problem) -> int:
    reads = problem.m * problem.m + problem.m * problem.n
    writes = problem.m * problem.n * ITEM_BYTES[problem.out_dtype]
    return problem.batch * (reads * ITEM_BYTES[problem.dtype] + writes)


OP = OpSpec("apply", "Y = αQX (+ βX)", arguments, reference, make_inputs, flops, bytes_moved)
