"""``momentum`` by PyTorch: elementwise, on tensors of any dtype; by address on a CPU alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem
from dmuon_tune.spec import KernelSpec

from ._inputs import torch_dtype
from ._library import tensor_at
from .momentum import MODES


@dataclass(frozen=True)
class MomentumConfig:
    """PyTorch leaves nothing to choose."""


def refusal(problem: Problem, device: DeviceFingerprint) -> str | None:
    if problem.epilogue not in MODES:
        return f"epilogue must be one of {', '.join(MODES)}, not {problem.epilogue}"
    if device.kind != "cpu":
        return "PyTorch makes no tensor from an address on a GPU"
    return None


def update(
    gradients: Sequence[Tensor], momenta: Sequence[Tensor], x: Tensor, mode: str, mu: float, scale: float, eps: float
) -> None:
    """The op on the tensors themselves, each (rows, cols), into ``x``, (batch, rows, cols); none has no ``momenta``.

    float64 matrices are computed in float64, all others in fp32.
    """
    for index, gradient in enumerate(gradients):
        u = gradient.to(torch.float64 if gradient.dtype == torch.float64 else torch.float32)
        if mode != "none":
            momentum = momenta[index]
            moved = momentum.to(u.dtype).mul_(mu).add_(u) if momentum.dtype != u.dtype else momentum.mul_(mu).add_(u)
            momentum.copy_(moved)
            kept = momentum.to(u.dtype)
            u = u + mu * kept if mode == "n" else kept
        x[index].copy_(_scaled(u, scale, eps))


def _scaled(u: Tensor, scale: float, eps: float) -> Tensor:
    """scale · U / (‖U‖_F + eps): squares of U over its largest entry neither overflow nor vanish."""
    tiny = torch.finfo(u.dtype).tiny
    largest = u.abs().amax().clamp_min(tiny)
    unit = u / largest
    norm = torch.linalg.vector_norm(unit)
    divisor = norm + eps / largest
    factor = torch.where(divisor == 0.0, 0.0, scale / divisor)  # a zero matrix stays zero, with eps = 0 too
    scaled: Tensor = unit * factor + 0.0 * norm  # NaN and inf (inf/inf) spread over their own matrix
    return scaled


def build(problem: Problem, config: MomentumConfig, device: DeviceFingerprint) -> Callable[..., Any]:
    def at(address: int) -> Tensor:
        return tensor_at(address, (problem.m, problem.n), torch_dtype(problem.dtype))

    def none(g: Tensor, x: Tensor, scale: float, eps: float) -> None:
        update([at(address) for address in g.tolist()], (), x, "none", 0.0, scale, eps)

    def momentum(g: Tensor, momenta: Tensor, x: Tensor, mu: float, scale: float, eps: float) -> None:
        gradients, buffers = ([at(address) for address in each.tolist()] for each in (g, momenta))
        update(gradients, buffers, x, problem.epilogue, mu, scale, eps)

    return none if problem.epilogue == "none" else momentum


KERNEL = KernelSpec(
    "momentum", "library", MomentumConfig, refusal, build,
    (__name__, f"{__package__}._library", f"{__package__}.momentum"),
)
