"""Op ``apply``: Y = α·Q·X (+ β·X), an m×m factor applied to m×n matrices, or the weights' update by α·Q·X."""

from __future__ import annotations

import torch
from torch import Tensor

from dmuon_tune.problem import ITEM_BYTES, Problem
from dmuon_tune.spec import Argument, OpSpec

from ._inputs import gaussian, generator, stored

EPILOGUES = ("none", "c", "w")


def arguments(problem: Problem) -> tuple[Argument, ...]:
    """q: (batch, m, m); x, y: (batch, m, n) in ``row`` layout, (batch, n, m) in ``col``; alpha; beta with epilogue c.

    Q need not be symmetric. The βX term reads x again: epilogue ``c`` takes no further tensor. Epilogue ``w`` has no y:
    it updates the weights w, stored like x, in out_dtype, each contiguous at an address of its own, a multiple of 16
    bytes: W ← rates[·, 0]·W − rates[·, 1]·α·Q·X in fp32, rounded once. rates: float32 (batch, 2), 1 − η·λ and η·s
    of each matrix, which lie in memory so that a captured launch follows a schedule.
    """
    matrix = stored(problem.batch, problem.m, problem.n, problem.layout)
    operands = (
        Argument("q", "input", (problem.batch, problem.m, problem.m), problem.dtype),
        Argument("x", "input", matrix, problem.dtype),
    )
    alpha = Argument("alpha", "scalar")
    if problem.epilogue == "w":
        w = Argument("w", "inout", matrix, problem.out_dtype, separate=True)
        return *operands, w, Argument("rates", "input", (problem.batch, 2), "float32"), alpha
    y = Argument("y", "output", matrix, problem.out_dtype)
    return *operands, y, alpha, *((Argument("beta", "scalar"),) if problem.has_c else ())


def reference(problem: Problem, q: Tensor, x: Tensor, *rest: Tensor | float) -> Tensor:
    """Y or the new W in float64, stored as x is; ``rest`` is alpha (and beta), or w, rates and alpha."""
    product = q.double() @ x.double() if problem.layout == "row" else x.double() @ q.double().mT
    if problem.epilogue == "w":
        w, rates, alpha = rest
        assert isinstance(w, Tensor) and isinstance(rates, Tensor)
        decay, rate = rates.double()[:, :, None, None].unbind(1)
        return decay * w.double() - rate * alpha * product
    return rest[0] * product + (rest[1] * x.double() if problem.has_c else 0.0)


def make_inputs(problem: Problem, device: str, seed: int) -> tuple[Tensor, ...]:
    """Gaussian Q (asymmetric, so that a transposed Q shows) with spectral radius near 1, and Gaussian X.

    With epilogue w, Gaussian weights and rates that differ between matrices.
    """
    rng = generator(device, seed)
    matrix = stored(problem.batch, problem.m, problem.n, problem.layout)
    q = gaussian((problem.batch, problem.m, problem.m), problem.dtype, device, rng, problem.m**-0.5)
    x = gaussian(matrix, problem.dtype, device, rng)
    if problem.epilogue != "w":
        return q, x
    w = gaussian(matrix, problem.out_dtype, device, rng)
    return q, x, w, 0.5 + 0.5 * torch.rand((problem.batch, 2), device=device, generator=rng)


def flops(problem: Problem) -> int:
    return 2 * problem.batch * problem.m * problem.m * problem.n


def bytes_moved(problem: Problem) -> int:
    reads = (problem.m * problem.m + problem.m * problem.n) * ITEM_BYTES[problem.dtype]
    result = problem.m * problem.n * ITEM_BYTES[problem.out_dtype]
    if problem.epilogue == "w":
        return problem.batch * (reads + 2 * result + 2 * ITEM_BYTES["float32"])
    return problem.batch * (reads + result)


OP = OpSpec("apply", "Y = αQX (+ βX), W ← ρW − ηαQX", arguments, reference, make_inputs, flops, bytes_moved)
