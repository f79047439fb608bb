"""Op ``momentum``: momentum, Frobenius norm and cast of a batch of matrices at separate addresses, for the chain."""

from __future__ import annotations

import torch
from torch import Tensor

from dmuon_tune.problem import ITEM_BYTES, Problem
from dmuon_tune.spec import Argument, OpSpec

from ._inputs import gaussian, generator

MODES = ("none", "m", "n")  # U is given; is the updated momentum; is Nesterov's G + μM


def arguments(problem: Problem) -> tuple[Argument, ...]:
    """g: the gradients (U itself with epilogue none) and, with m or n, momentum: (batch, m, n) in dtype, each matrix
    contiguous at its own address; x: (batch, m, n); mu with m or n; scale; eps.

    M ← μM + G, computed in fp32 and rounded to dtype; U = M (m), G + μM (n) or the given one;
    X = scale · U / (‖U‖_F + eps), by matrix and rounded once. Zero gives zero with any eps ≥ 0; a matrix with NaN or
    inf becomes NaN, and no other does. The order of elements changes nothing: a transposed matrix is the same problem,
    layout ``row`` and k = 1.
    """
    matrix = (problem.batch, problem.m, problem.n)
    gradients = Argument("g", "input", matrix, problem.dtype, separate=True)
    x = Argument("x", "output", matrix, problem.out_dtype)
    ends = (Argument("scale", "scalar"), Argument("eps", "scalar"))
    if problem.epilogue == "none":
        return gradients, x, *ends
    momentum = Argument("momentum", "inout", matrix, problem.dtype, separate=True)
    return gradients, momentum, x, Argument("mu", "scalar"), *ends


def reference(problem: Problem, g: Tensor, *rest: Tensor | float) -> Tensor | tuple[Tensor, Tensor]:
    """X in float64, before it M where there is momentum; ``rest`` is momentum and mu (if any), scale, eps."""
    scale, eps = float(rest[-2]), float(rest[-1])
    if problem.epilogue == "none":
        return _scaled(g.double(), scale, eps)
    momentum, mu = rest[0], float(rest[1])
    assert isinstance(momentum, Tensor)
    moved = mu * momentum.double() + g.double()
    kept = moved.to(momentum.dtype).double()
    return moved, _scaled(g.double() + mu * kept if problem.epilogue == "n" else kept, scale, eps)


def _scaled(u: Tensor, scale: float, eps: float) -> Tensor:
    norms = torch.linalg.vector_norm(u, dim=(-2, -1), keepdim=True)
    divisor = norms + eps
    scaled: Tensor = u * torch.where(divisor == 0.0, 0.0, scale / divisor)
    return scaled


def make_inputs(problem: Problem, device: str, seed: int) -> tuple[Tensor, ...]:
    """Gaussian gradients and, with momentum, a momentum of another size."""
    rng = generator(device, seed)
    shape = (problem.batch, problem.m, problem.n)
    count = 1 if problem.epilogue == "none" else 2
    return tuple(gaussian(shape, problem.dtype, device, rng, scale) for scale in (1.0, 3.0)[:count])


def flops(problem: Problem) -> int:
    """Multiplications and additions an element: two for each of momentum, Nesterov and square, one for the scale."""
    each = {"none": 3, "m": 5, "n": 7}[problem.epilogue]
    return each * problem.batch * problem.m * problem.n


def bytes_moved(problem: Problem) -> int:
    """Two passes, for the norm must be known before X: U is read, or computed again, in each."""
    touched = {"none": 2, "m": 4, "n": 5}[problem.epilogue]
    per_element = touched * ITEM_BYTES[problem.dtype] + ITEM_BYTES[problem.out_dtype]
    return problem.batch * problem.m * problem.n * per_element


OP = OpSpec(
    "momentum", "M ← μM + G, X = U/‖U‖", arguments, reference, make_inputs, flops, bytes_moved
)
