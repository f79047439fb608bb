"""Op ``gram_span``: the steps of the Gram form between two restarts, from R = XXᵀ to the factor Q, in one launch."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from dmuon_tune.errors import UsageError
from dmuon_tune.problem import ITEM_BYTES, Problem
from dmuon_tune.spec import Argument, OpSpec

from ._inputs import generator, like_gram, torch_dtype

SPAN = re.compile(r"s([1-9]\d*)")
# Of these inputs emulated, m from 1 to 1024: at most 1.3 eps of a 16-bit dtype up to three steps, 7 from five on, for
# the error of R's smallest eigenvalues grows until they are near 1; in fp32 3e-6.
FEW_STEPS, EPS_FEW, EPS_MANY, TOLERANCE_FP32 = 3, 4, 16, 1e-4
WORK_SQUARES = 5  # Z, S, R and two of Q in turn
BARRIERS = 32  # counters of a matrix, a cache line: blocks that share a matrix wait for each other there
CLASSICAL = (1.875, -1.25, 0.375)  # the quintic that converges from below, so that any number of steps stays in range


def steps_of(problem: Problem) -> int:
    """Steps of an epilogue like ``s3``; UsageError where it is none such."""
    found = SPAN.fullmatch(problem.epilogue)
    if not found:
        raise UsageError(f"gram_span: the epilogue must name its steps, like s3, not {problem.epilogue!r}")
    return int(found[1])


def misshapen(problem: Problem) -> str | None:
    """Why no kernel serves a problem: its epilogue names no steps, or its axes are not a square's."""
    try:
        steps_of(problem)
    except UsageError as error:
        return str(error)
    if not problem.m == problem.n == problem.k or problem.layout != "row":
        return f"R is square: n and k must be m = {problem.m} and the layout row, not {problem.label()}"
    if problem.out_dtype != problem.dtype:
        return f"writes its operand's dtype: {problem.dtype} in, {problem.out_dtype} asked"
    return None


def arguments(problem: Problem) -> tuple[Argument, ...]:
    """r, q: (batch, m, m), symmetric; coefficients: float32 (steps, 3); work: (5, batch, m, m); barriers: int32.

    A step has a row (a, b, c): Z = cR² + bR; Q ← QZ + aQ, at the first step Q = Z + aI; in each step but the last
    S = RZ + aR, R ← SZ + aS. Each is rounded once, from an fp32 sum, and Z is kept without aI for what follows. The
    squares in between may lie in ``work``.
    """
    square = (problem.batch, problem.m, problem.m)
    return (
        Argument("r", "input", square, problem.dtype),
        Argument("coefficients", "input", (steps_of(problem), 3), "float32", shared=True),
        Argument("q", "output", square, problem.out_dtype),
        Argument("work", "scratch", (WORK_SQUARES, *square), problem.dtype, shared=True),
        Argument("barriers", "zeros", (problem.batch * BARRIERS,), "int32", shared=True),
    )


def reference(problem: Problem, r: Tensor, coefficients: Tensor) -> Tensor:
    """Q in float64, (batch, m, m)."""
    r = r.double()
    identity = torch.eye(problem.m, dtype=torch.float64, device=r.device)
    q = identity
    for a, b, c in coefficients.double().tolist():
        p = c * r @ r + b * r + a * identity
        q, r = q @ p, r @ p @ p
    return q


def make_inputs(problem: Problem, device: str, seed: int) -> tuple[Tensor, ...]:
    """R with singular values of X from 0.1 to 1, as after a restart, and coefficients that differ from step to step.

    With a first span's, of 1/√m and less, Q would be nearly aI, and nothing else in it would show.
    """
    rng = generator(device, seed)
    r = like_gram(problem, device, rng)
    factors = 0.9 + 0.2 * torch.rand(steps_of(problem), 1, device=device, generator=rng)
    return r, factors * torch.tensor(CLASSICAL, device=device)


def tolerance(problem: Problem) -> float:
    if problem.dtype == "float32":
        return TOLERANCE_FP32
    eps: float = torch.finfo(torch_dtype(problem.dtype)).eps
    return eps * (EPS_FEW if steps_of(problem) <= FEW_STEPS else EPS_MANY)


def flops(problem: Problem) -> int:
    """Symmetric results counted once, m³ each: a Z a step, three more products a step but one."""
    steps = steps_of(problem)
    return problem.batch * problem.m**3 * (steps + 3 * (steps - 1))


def bytes_moved(problem: Problem) -> int:
    """R read and Q written; the squares in between may stay in a cache."""
    return problem.batch * problem.m**2 * (ITEM_BYTES[problem.dtype] + ITEM_BYTES[problem.out_dtype])


OP = OpSpec(
    "gram_span", "Q = Π (cR² + bR + aI)", arguments, reference, make_inputs, flops, bytes_moved, symmetric_output=True,
    tolerance=tolerance,
)
