"""``polar_small`` by the vendor library: the same recurrence, one batched product at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.errors import UsageError
from dmuon_tune.problem import Problem
from dmuon_tune.space import choice
from dmuon_tune.spec import KernelSpec

from .polar_small import internal_scale, schedule


@dataclass(frozen=True)
class PolarConfig:
    """``plain`` works on X in every step, ``gram`` on XXᵀ between the problem's restarts."""

    form: str = choice("plain", ("plain", "gram"))


def refusal(problem: Problem, device: DeviceFingerprint) -> str | None:
    try:
        schedule(problem)
    except UsageError as error:
        return str(error)
    if problem.n < problem.m or problem.k != problem.m:
        return f"m must be the short side and k equal to it, not m {problem.m}, n {problem.n}, k {problem.k}"
    return None


def build(problem: Problem, config: PolarConfig, device: DeviceFingerprint) -> Callable[..., Any]:
    """Products in fp16 on a GPU; in fp32 on a CPU, which multiplies fp16 slower."""
    dtype = torch.float16 if device.kind == "cuda" else torch.float32
    steps, restarts = schedule(problem)
    tall, scale = problem.layout == "col", internal_scale(problem.m)

    def polar_small(u: Tensor, coefficients: Tensor, y: Tensor, norm_factor: float) -> None:
        x = (scale * _normalized(u.mT if tall else u, norm_factor)).to(dtype)
        scaled = coefficients / torch.tensor([1.0, scale**2, scale**4], device=u.device)
        triples = scaled.unsqueeze(-1).unbind()  # on the device: reading them here would wait for it
        x = _plain(x, triples) if config.form == "plain" else _gram(x, triples, restarts)
        y.copy_((x.mT if tall else x) / scale)

    return polar_small


def _normalized(u: Tensor, norm_factor: float) -> Tensor:
    """U / (norm_factor · ‖U‖_F) in fp32, at any scale: zero stays zero, inf and NaN become NaN."""
    x = u.float()
    x = x / x.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return x.div((norm_factor * norms).clamp_min(torch.finfo(torch.float32).tiny))


def _plain(x: Tensor, triples: tuple[Tensor, ...]) -> Tensor:
    for a, b, c in triples:
        square = x @ x.mT
        x = (a * x + (b * square + c * (square @ square)).to(x.dtype) @ x).to(x.dtype)
    return x


def _gram(x: Tensor, triples: tuple[Tensor, ...], restarts: tuple[int, ...]) -> Tensor:
    q: Tensor | None = None
    r = x @ x.mT
    for step, (a, b, c) in enumerate(triples):
        if step in restarts and q is not None:
            x, q = q @ x, None
            r = x @ x.mT
        z = (b * r + c * (r @ r)).to(x.dtype)
        p = z + (a * torch.eye(r.shape[-1], device=r.device)).to(x.dtype)
        q = p if q is None else (q @ z + a * q).to(x.dtype)
        s = r @ z + (a * r).to(x.dtype)
        r = s @ z + (a * s).to(x.dtype)
    return x if q is None else q @ x


KERNEL = KernelSpec(
    "polar_small", "library", PolarConfig, refusal, build, (__name__, f"{__package__}.polar_small")
)
