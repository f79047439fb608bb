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

GUARD_ELEMENTS = 4096  # NaNs kept on both sides of an output, where an out-of-range store would show
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
    err like √k.
    """
    if problem.out_dtype == "float32":
        return 2e-6 * math.sqrt(problem.k) + 1e-5
    return 4 * float(torch.finfo(getattr(torch, problem.out_dtype)).eps)


def random_scalars(op: OpSpec, problem: Problem, seed: int) -> list[float]:
    """One value for each scalar argument, in order; never 0 or 1, which a kernel could treat specially."""
    rng = random.Random(seed)
    names = [argument.name for argument in op.arguments(problem) if argument.role == "scalar"]
    return [rng.uniform(*SCALAR_RANGES.get(name, (0.5, 0.9))) for name in names]


def in_launch_order(
    op: OpSpec, problem: Problem, inputs: Sequence[Any], outputs: Sequence[Any], scalars: Sequence[float]
) -> list[Any]:
    """The positional arguments of a launch."""
    by_role = {"input": iter(inputs), "output": iter(outputs), "scalar": iter(scalars)}
    return [next(by_role[argument.role]) for argument in op.arguments(problem)]


def verify(launch: Callable[..., Any], op: OpSpec, problem: Problem, device: str, seed: int) -> Verdict:
    """Launch twice on poisoned outputs and compare with float64; raises whatever the launch raises."""
    inputs = op.make_inputs(problem, device, seed)
    originals = [tensor.clone() for tensor in inputs]
    scalars = random_scalars(op, problem, seed)
    runs = []
    for _ in range(2):
        buffers, outputs = _guarded_outputs(op, problem, device)
        launch(*in_launch_order(op, problem, inputs, outputs, scalars))
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        runs.append((buffers, outputs))
    (first_buffers, first), (second_buffers, second) = runs
    error = _largest_error(op, problem, originals, scalars, first)
    if error.failure:
        return error
    failure = ""
    if not all(_same_bits(before, after) for before, after in zip(originals, inputs, strict=True)):
        failure = "the launch changed its inputs"
    elif not all(_guards_intact(buffer) for buffer in first_buffers + second_buffers):
        failure = "the launch wrote outside its output"
    elif not all(_same_bits(one, other) for one, other in zip(first, second, strict=True)):
        failure = "two runs on the same inputs differ"
    return Verdict(failure, error.max_rel_err)


def _guarded_outputs(op: OpSpec, problem: Problem, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """(buffers, outputs): NaN-filled buffers and the output tensors in their middles."""
    buffers, outputs = [], []
    for argument in op.arguments(problem):
        if argument.role == "output":
            count = math.prod(argument.shape)
            buffer = torch.full(
                (count + 2 * GUARD_ELEMENTS,), math.nan, dtype=getattr(torch, argument.dtype), device=device
            )
            buffers.append(buffer)
            outputs.append(buffer[GUARD_ELEMENTS : GUARD_ELEMENTS + count].view(argument.shape))
    return buffers, outputs


def _guards_intact(buffer: Tensor) -> bool:
    return bool(buffer[:GUARD_ELEMENTS].isnan().all() and buffer[-GUARD_ELEMENTS:].isnan().all())


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _largest_error(
    op: OpSpec, problem: Problem, inputs: Sequence[Tensor], scalars: Sequence[float], outputs: Sequence[Tensor]
) -> Verdict:
    """Compare matrix by matrix, a few matrices at a time so that float64 copies stay small."""
    (output,) = outputs
    shared = [argument.shared for argument in op.arguments(problem) if argument.role == "input"]
    per_matrix = sum(tensor[0].numel() for tensor in (*inputs, output))
    chunk = max(1, CHUNK_ELEMENTS // per_matrix)
    allowed, worst = op.tolerance or tolerance(problem), 0.0
    for start in range(0, problem.batch, chunk):
        part = slice(start, start + chunk)
        out = output[part].double()
        if not bool(out.isfinite().all()):
            missing = int((~out.isfinite()).sum())
            return Verdict(f"{missing} of {out.numel()} output elements are not finite or were not written", None)
        parts = (tensor if whole else tensor[part] for tensor, whole in zip(inputs, shared, strict=True))
        reference = op.reference(problem, *parts, *scalars)
        rms = reference.square().mean((-2, -1), keepdim=True).sqrt()
        scale = (reference.abs() + rms).clamp_min(torch.finfo(torch.float64).tiny)
        error = (out - reference).abs() / scale
        worst = max(worst, float(error.max()))
        if worst > allowed:
            where = tuple(int(axis) for axis in torch.unravel_index(error.argmax(), error.shape))
            return Verdict(f"relative error {worst:.3g} > {allowed:.3g} at {(where[0] + start, *where[1:])}", worst)
        if op.symmetric_output:
            asymmetry = float(((out - out.mT).abs() / scale).max())
            if asymmetry > allowed:
                return Verdict(f"output is asymmetric: relative difference {asymmetry:.3g} > {allowed:.3g}", worst)
    return Verdict("", worst)
