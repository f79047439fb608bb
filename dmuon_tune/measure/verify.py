"""Checks a compiled kernel against its op's float64 reference on fresh random inputs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmuon_tune.problem import Problem
from dmuon_tune.spec import OpSpec
from dmuon_tune.words import counted

# What verify() asks of a kernel, as a part of its results' keys: another text here makes all results stale.
VALIDATION = "float64 reference on random inputs, poisoned and guarded outputs, two runs bit-equal"
ALLOCATED = ("output", "scratch", "zeros")  # roles of which a caller has no values
GUARD_ELEMENTS = 4096  # poison kept on both sides of what is written, where an out-of-range store would show
INTEGER_POISON = -(2**30) - 1  # integers have no NaN
CHUNK_ELEMENTS = 2**26  # tensor elements checked at once: half a GiB in float64
# Apart enough that αAB + βC + γI never cancels at m = 1, where |AB| = |C| = 1: a sum near 0 would magnify rounding.
SCALAR_RANGES = {"alpha": (0.5, 0.9), "beta": (-0.4, -0.2), "gamma": (1.6, 2.0), "norm_factor": (1.3, 1.7)}


@dataclass(frozen=True)
class Verdict:
    """``failure`` is empty where the kernel is right; ``max_rel_err`` is None where the output is not finite."""

    failure: str
    max_rel_err: float | None


def tolerance(problem: Problem) -> float:
    """Largest accepted |out − ref| / (|ref| + rms(ref)).

    Two roundings to a 16-bit output and one of a subsequent sum stay below 4 eps; fp32 sums of k terms in any order
    err like √k. Momentum is rounded to its own dtype before it is used.
    """
    rounded = {problem.out_dtype, *((problem.dtype,) if problem.op == "momentum" else ())} - {"float32"}
    if not rounded:
        return 2e-6 * math.sqrt(problem.k) + 1e-5
    return 4 * max(float(torch.finfo(getattr(torch, name)).eps) for name in rounded)


def random_scalars(op: OpSpec, problem: Problem, seed: int) -> list[float]:
    """One value for each scalar argument, in order; never 0 or 1, which a kernel could treat specially."""
    rng = random.Random(seed)
    names = [argument.name for argument in op.arguments(problem) if argument.role == "scalar"]
    return [rng.uniform(*SCALAR_RANGES.get(name, (0.5, 0.9))) for name in names]


def in_launch_order(
    op: OpSpec, problem: Problem, inputs: Sequence[Any], allocated: Sequence[Any], scalars: Sequence[float]
) -> list[Any]:
    """One value an argument, in order: every tensor with its batch axis. ``inputs`` are also the ``inout`` ones,
    ``allocated`` those of :func:`allocate`."""
    read, made = iter(inputs), iter(allocated)
    by_role = {"input": read, "inout": read, "scalar": iter(scalars)}
    return [next(by_role.get(argument.role, made)) for argument in op.arguments(problem)]


def allocate(op: OpSpec, problem: Problem, device: str) -> list[Tensor]:
    """New tensors for the ``ALLOCATED`` arguments, in order; their content means nothing but for ``zeros``."""
    return [
        (torch.zeros if argument.role == "zeros" else torch.empty)(
            argument.shape, dtype=getattr(torch, argument.dtype), device=device
        )
        for argument in op.arguments(problem)
        if argument.role in ALLOCATED
    ]


def as_launched(op: OpSpec, problem: Problem, values: Sequence[Any]) -> list[Any]:
    """The positional arguments of a launch, which reads tensors at separate addresses from ``values`` themselves."""
    return [
        addresses(value.unbind()) if argument.separate else value
        for argument, value in zip(op.arguments(problem), values, strict=True)
    ]


def addresses(matrices: Sequence[Tensor]) -> Tensor:
    """Where each of these tensors begins, as an int64 tensor on their device."""
    return torch.tensor([matrix.data_ptr() for matrix in matrices], device=matrices[0].device)


@dataclass(frozen=True)
class _Run:
    """One launch's values, in order; those it may write lie within ``buffers`` of poison, whose content they share."""

    values: list[Any]
    buffers: list[Tensor]
    written: list[Tensor]
    zeros: list[Tensor]


def verify(launch: Callable[..., Any], op: OpSpec, problem: Problem, device: str, seed: int) -> Verdict:
    """Launch twice on poisoned outputs and scratch and compare with float64; raises whatever the launch raises."""
    inputs = op.make_inputs(problem, device, seed)
    originals = [tensor.clone() for tensor in inputs]
    scalars = random_scalars(op, problem, seed)
    runs = []
    for _ in range(2):
        run = _guarded(op, problem, inputs, scalars, device)
        launch(*as_launched(op, problem, run.values))
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        runs.append(run)
    first, second = runs
    error = _largest_error(op, problem, originals, scalars, first.written)
    if error.failure:
        return error
    failure = ""
    if not all(_same_bits(before, after) for before, after in zip(originals, inputs, strict=True)):
        failure = "the launch changed its inputs"
    elif not all(_guards_intact(buffer) for buffer in first.buffers + second.buffers):
        failure = "the launch wrote outside its output"
    elif any(bool(zeros.any()) for zeros in first.zeros + second.zeros):
        failure = "the launch did not leave its counters at zero"
    elif not all(_same_bits(one, other) for one, other in zip(first.written, second.written, strict=True)):
        failure = "two runs on the same inputs differ"
    return Verdict(failure, error.max_rel_err)


def _guarded(
    op: OpSpec, problem: Problem, inputs: Sequence[Tensor], scalars: Sequence[float], device: str
) -> _Run:
    """A launch's values; what it may write lies in the middle of buffers full of poison."""
    arguments = op.arguments(problem)
    unset = [None for argument in arguments if argument.role in ALLOCATED]
    run = _Run(in_launch_order(op, problem, inputs, unset, scalars), [], [], [])
    for place, argument in enumerate(arguments):
        if argument.role in ("input", "scalar"):
            continue
        count = math.prod(argument.shape)
        dtype = getattr(torch, argument.dtype)
        buffer = torch.full((count + 2 * GUARD_ELEMENTS,), _poison(dtype), dtype=dtype, device=device)
        middle = buffer[GUARD_ELEMENTS : GUARD_ELEMENTS + count].view(argument.shape)
        if argument.role == "inout":
            middle.copy_(run.values[place])
        if argument.role == "zeros":
            run.zeros.append(middle.zero_())
        if argument.role in ("inout", "output"):
            run.written.append(middle)
        run.values[place] = middle
        run.buffers.append(buffer)
    return run


def _poison(dtype: torch.dtype) -> float:
    return math.nan if dtype.is_floating_point else INTEGER_POISON


def _guards_intact(buffer: Tensor) -> bool:
    guards = torch.cat((buffer[:GUARD_ELEMENTS], buffer[-GUARD_ELEMENTS:]))
    return bool((guards.isnan() if buffer.dtype.is_floating_point else guards == INTEGER_POISON).all())


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _largest_error(
    op: OpSpec, problem: Problem, inputs: Sequence[Tensor], scalars: Sequence[float], outputs: Sequence[Tensor]
) -> Verdict:
    """Compare matrix by matrix, a few matrices at a time so that float64 copies stay small."""
    shared = [argument.shared for argument in op.arguments(problem) if argument.role in ("input", "inout")]
    per_matrix = sum(tensor[0].numel() for tensor in (*inputs, *outputs))
    chunk = max(1, CHUNK_ELEMENTS // per_matrix)
    worst = 0.0
    for start in range(0, problem.batch, chunk):
        part = slice(start, start + chunk)
        parts = (tensor if whole else tensor[part] for tensor, whole in zip(inputs, shared, strict=True))
        result = op.reference(problem, *parts, *scalars)
        references = result if isinstance(result, tuple) else (result,)
        for output, reference in zip(outputs, references, strict=True):
            verdict = _compare(op, problem, output[part].double(), reference, start)
            worst = max(worst, verdict.max_rel_err or 0.0)
            if verdict.failure:
                return verdict
    return Verdict("", worst)


def _compare(op: OpSpec, problem: Problem, out: Tensor, reference: Tensor, start: int) -> Verdict:
    """The error of one chunk, which begins at matrix ``start`` of the batch."""
    if not bool(out.isfinite().all()):
        missing = int((~out.isfinite()).sum())
        return Verdict(f"not finite or not written: {missing} of {counted(out.numel(), 'output element')}", None)
    own = op.tolerance(problem) if callable(op.tolerance) else op.tolerance
    allowed = tolerance(problem) if own is None else own
    rms = reference.square().mean((-2, -1), keepdim=True).sqrt()
    scale = (reference.abs() + rms).clamp_min(torch.finfo(torch.float64).tiny)
    error = (out - reference).abs() / scale
    worst = float(error.max())
    if worst > allowed:
        where = tuple(int(axis) for axis in torch.unravel_index(error.argmax(), error.shape))
        return Verdict(f"relative error {worst:.3g} > {allowed:.3g} at {(where[0] + start, *where[1:])}", worst)
    if op.symmetric_output:
        asymmetry = float(((out - out.mT).abs() / scale).max())
        if asymmetry > allowed:
            return Verdict(f"output is asymmetric: relative difference {asymmetry:.3g} > {allowed:.3g}", worst)
    return Verdict("", worst)
