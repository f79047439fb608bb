"""``polar_small`` by the vendor library: the same recurrence, one batched product at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem
from dmuon_tune.space import choice
from dmuon_tune.spec import KernelSpec

from .polar_small import input_scale, misshapen, schedule


@dataclass(frozen=True)
class PolarConfig:
    """``plain`` works on X in every step, ``gram`` on XXᵀ between the problem's restarts."""

    form: str = choice("plain", ("plain", "gram"))


def refusal(problem: Problem, device: DeviceFingerprint) -> str | None:
    return misshapen(problem)


def build(problem: Problem, config: PolarConfig, device: DeviceFingerprint) -> Callable[..., Any]:
    """Products in fp16 on a GPU; in fp32 on a CPU, which multiplies fp16 slower."""
    dtype = torch.float16 if device.kind == "cuda" else torch.float32
    restarts, tall = schedule(problem)[1], problem.layout == "col"

    def polar_small(u: Tensor, coefficients: Tensor, y: Tensor, norm_factor: float) -> None:
        x = recurrence(u.mT if tall else u, coefficients, norm_factor, config.form, restarts, dtype)
        y.copy_(x.mT if tall else x)

    return polar_small


def recurrence(
    u: Tensor, coefficients: Tensor, norm_factor: float, form: str, restarts: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """The recurrence on wide U, (batch, m, n), with products in ``dtype``; X is held times ``input_scale``.

    The coefficients stay on their device: reading them here would wait for it, and no graph could be captured.
    """
    scale = input_scale(u.shape[-2])
    x = (scale * _normalized(u, norm_factor)).to(dtype)
    triples = coefficients.unsqueeze(-1).unbind()
    return (_plain(x, triples, scale) if form == "plain" else _gram(x, triples, scale, restarts)) / scale


def _normalized(u: Tensor, norm_factor: float) -> Tensor:
    """U / (norm_factor · ‖U‖_F) in fp32, at any scale: zero stays zero, inf and NaN become NaN."""
    x = u.float()
    x = x / x.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return x.div((norm_factor * norms).clamp_min(torch.finfo(torch.float32).tiny))


def _polynomial(square: Tensor, b: Tensor, c: Tensor, scale: float) -> Tensor:
    """Z = bA + cA² from scale²·A: the square of what is held would leave fp16's range."""
    held = square / scale**2
    return (b * held + c * (held @ held)).to(square.dtype)


def _plain(x: Tensor, triples: tuple[Tensor, ...], scale: float) -> Tensor:
    for a, b, c in triples:
        x = (a * x + _polynomial(x @ x.mT, b, c, scale) @ x).to(x.dtype)
    return x


def _gram(x: Tensor, triples: tuple[Tensor, ...], scale: float, restarts: tuple[int, ...]) -> Tensor:
    q: Tensor | None = None
    r = x @ x.mT
    for step, (a, b, c) in enumerate(triples):
        if step in restarts and q is not None:
            x, q = q @ x, None
            r = x @ x.mT
        z = _polynomial(r, b, c, scale)
        p = z + (a * torch.eye(r.shape[-1], device=r.device)).to(x.dtype)
        q = p if q is None else (q @ z + a * q).to(x.dtype)
        s = (r @ z + a * r).to(x.dtype)
        r = (s @ z + a * s).to(x.dtype)
    return x if q is None else q @ x


KERNEL = KernelSpec(
    "polar_small", "library", PolarConfig, refusal, build, (__name__, f"{__package__}.polar_small")
)
