"""``gram_span`` by the vendor library: full products, one launch or more each, no use of symmetry."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem
from dmuon_tune.spec import KernelSpec

from .gram_span import misshapen, steps_of


@dataclass(frozen=True)
class SpanConfig:
    """PyTorch leaves nothing to choose."""


def refusal(problem: Problem, device: DeviceFingerprint) -> str | None:
    return misshapen(problem)


def build(problem: Problem, config: SpanConfig, device: DeviceFingerprint) -> Callable[..., Any]:
    on_cpu, steps = device.kind == "cpu", steps_of(problem)
    product = _product if on_cpu else _product_on_device

    def span(r: Tensor, coefficients: Tensor, q: Tensor, work: Tensor, barriers: Tensor) -> None:
        # On a GPU they stay on their device: reading them would wait for it, and no graph could be captured.
        triples: Iterable[Any] = coefficients.tolist() if on_cpu else [row.unbind() for row in coefficients]
        z, s, moved, spare, _ = work
        now, other = (q, spare) if steps % 2 else (spare, q)  # Q changes places at each step but the first
        for step, (a, b, c) in enumerate(triples):
            product(r, r, r, z, c, b)
            if step:
                product(now, now, z, other, 1.0, a)
                now, other = other, now
            else:
                now.copy_(z).diagonal(dim1=-2, dim2=-1).add_(a)
            if step + 1 < steps:
                product(r, r, z, s, 1.0, a)
                product(s, s, z, moved, 1.0, a)
                r = moved

    return span


def _product(c: Tensor, left: Tensor, right: Tensor, out: Tensor, alpha: float, beta: float) -> None:
    """out = alpha·left·right + beta·c. A·B, not A·Bᵀ, which lets rounding's asymmetry grow (docs/numerics.md)."""
    torch.baddbmm(c, left, right, beta=beta, alpha=alpha, out=out)


def _product_on_device(
    c: Tensor, left: Tensor, right: Tensor, out: Tensor, alpha: Tensor | float, beta: Tensor
) -> None:
    """The same with factors in device memory, rounded once: the product leaves the library in fp32."""
    wide = torch.bmm(left, right) if out.dtype == torch.float32 else torch.bmm(left, right, out_dtype=torch.float32)
    out.copy_(wide.mul_(alpha).add_(c.float() * beta))


KERNEL = KernelSpec(
    "gram_span", "library", SpanConfig, refusal, build, (__name__, f"{__package__}.gram_span")
)
