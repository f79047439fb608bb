"""Op ``polar_small``: the whole Newton–Schulz recurrence of a batch of small matrices, from the norm to the result."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from dmuon_tune.errors import UsageError
from dmuon_tune.problem import ITEM_BYTES, Problem
from dmuon_tune.spec import Argument, OpSpec

from ._inputs import gaussian, generator, stored

TOLERANCE = 2e-2  # emulated in fp16 on these inputs: at most 4e-3, bf16 output included; without a restart 1.4e-2
SCHEDULE = re.compile(r"s([1-9]\d*)((?:r[1-9]\d*)*)")
MAX_SCALE_EXPONENT = 6  # XXᵀ and what a step makes of it then stay below fp16's 65504
CLASSICAL = (1.875, -1.25, 0.375)  # the quintic that converges from below: slow growth keeps rounding errors small


def schedule(problem: Problem) -> tuple[int, tuple[int, ...]]:
    """(steps, restarts) of an epilogue like ``s5r2``: five steps, the Gram form returns to X before step 2 (from 0).

    UsageError where the epilogue is none such, or names a restart outside 1..steps − 1 or out of order.
    """
    found = SCHEDULE.fullmatch(problem.epilogue)
    steps = int(found[1]) if found else 0
    restarts = tuple(int(step) for step in found[2].split("r")[1:]) if found else ()
    if not found or list(restarts) != sorted({step for step in restarts if step < steps}):
        raise UsageError(
            f"polar_small: the epilogue must name steps and restarts, like s5r2 (restarts ascending, below the steps), "
            f"not {problem.epilogue!r}"
        )
    return steps, restarts


def misshapen(problem: Problem) -> str | None:
    """Why no kernel serves a problem: its epilogue is no schedule, or its axes are not those of a polar factor."""
    try:
        schedule(problem)
    except UsageError as error:
        return str(error)
    if problem.n < problem.m or problem.k != problem.m:
        return f"m must be the short side and k equal to it, not m {problem.m}, n {problem.n}, k {problem.k}"
    return None


def input_scale(m: int) -> float:
    """The power of two, with a square near m, by which a 16-bit recurrence holds X: XXᵀ's mean eigenvalue is near 1.

    Entries of X and XXᵀ would else sink into fp16's subnormal range. The recurrence itself scales by b/s² and c/s⁴.
    """
    return float(2.0 ** min(MAX_SCALE_EXPONENT, round(math.log2(m) / 2)))


def arguments(problem: Problem) -> tuple[Argument, ...]:
    """u, y: (batch, m, n) in ``row`` layout, (batch, n, m) in ``col``; coefficients: (steps, 3); norm_factor.

    m ≤ n; k = m. Y is the recurrence X ← aX + (bA + cA²)X, A = XXᵀ, with each row of the coefficients (a, b, c) in
    turn, begun at X = U / (norm_factor · ‖U‖_F). It does not depend on the scale of U; zero gives zero.
    """
    matrix = stored(problem.batch, problem.m, problem.n, problem.layout)
    return (
        Argument("u", "input", matrix, problem.dtype),
        Argument("coefficients", "input", (schedule(problem)[0], 3), "float32", shared=True),
        Argument("y", "output", matrix, problem.out_dtype),
        Argument("norm_factor", "scalar"),
    )


def reference(problem: Problem, u: Tensor, coefficients: Tensor, norm_factor: float) -> Tensor:
    """Y in float64, stored as u is; the plain form, to which the Gram form with any restarts is equal."""
    x = u.double() if problem.layout == "row" else u.double().mT
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x.div((norm_factor * norms).clamp_min(torch.finfo(torch.float64).tiny))
    for a, b, c in coefficients.double().tolist():
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x if problem.layout == "row" else x.mT


def make_inputs(problem: Problem, device: str, seed: int) -> tuple[Tensor, ...]:
    """Gaussian U, and coefficients that differ from step to step, so that a wrong step's would show."""
    rng = generator(device, seed)
    u = gaussian(stored(problem.batch, problem.m, problem.n, problem.layout), problem.dtype, device, rng)
    steps = schedule(problem)[0]
    factors = 0.9 + 0.2 * torch.rand(steps, 1, device=device, generator=rng)
    return u, factors * torch.tensor(CLASSICAL, device=device)


def flops(problem: Problem) -> int:
    """The Gram form's, symmetric products counted once: 6m²n + 14m³ a matrix for five steps and one restart."""
    steps, restarts = schedule(problem)
    spans = 1 + len(restarts)
    squares = steps + 3 * (steps - spans)
    return problem.batch * problem.m**2 * (3 * spans * problem.n + squares * problem.m)


def bytes_moved(problem: Problem) -> int:
    per_element = ITEM_BYTES[problem.dtype] + ITEM_BYTES[problem.out_dtype]
    return problem.batch * problem.m * problem.n * per_element


OP = OpSpec(
    "polar_small", "Y = polar(U) by Newton–Schulz", arguments, reference, make_inputs, flops, bytes_moved,
    tolerance=TOLERANCE,
)
