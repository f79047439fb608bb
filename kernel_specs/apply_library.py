"""``apply`` by the vendor library; the weights' update, by address, on a CPU alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem
from dmuon_tune.spec import KernelSpec

from . import _library
from ._inputs import stored, torch_dtype
from ._library import LibraryConfig, illegality, product, tensor_at
from .apply import EPILOGUES


def refusal(problem: Problem, device: DeviceFingerprint) -> str | None:
    if problem.epilogue not in EPILOGUES:
        return f"apply has the epilogues {', '.join(EPILOGUES)}, asked {problem.epilogue!r}"
    if problem.epilogue != "w":
        return _library.refusal(problem, device)
    return "PyTorch makes no tensor from an address on a GPU" if device.kind != "cpu" else None


def build(problem: Problem, config: LibraryConfig, device: DeviceFingerprint) -> Callable[..., Any]:
    multiply = product(config)

    def row(q: Tensor, x: Tensor, y: Tensor, alpha: float, beta: float = 0.0) -> None:
        multiply(x, q, x, y, alpha, beta)

    def col(q: Tensor, x: Tensor, y: Tensor, alpha: float, beta: float = 0.0) -> None:
        multiply(x, x, q.mT, y, alpha, beta)

    apply = row if problem.layout == "row" else col
    _, *matrix = stored(problem.batch, problem.m, problem.n, problem.layout)

    def update(q: Tensor, x: Tensor, w: Tensor, rates: Tensor, alpha: float) -> None:
        """The product in fp32, as a kernel's accumulators are, one matrix after another."""
        for index, (address, (decay, rate)) in enumerate(zip(w.tolist(), rates.tolist(), strict=True)):
            one = slice(index, index + 1)
            wide = x[one].float()
            y = torch.empty_like(wide)
            apply(q[one].float(), wide, y, alpha)
            weight = tensor_at(address, tuple(matrix), torch_dtype(problem.out_dtype))
            weight.copy_(decay * weight.float() - rate * y[0])

    return update if problem.epilogue == "w" else apply


KERNEL = KernelSpec(
    "apply", "library", LibraryConfig, refusal, build, (__name__, f"{__package__}._library"), illegality
)
