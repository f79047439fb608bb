"""The vendor library as a kernel: cuBLAS or the CPU's BLAS through PyTorch, shared by the three ops' library files."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import EPILOGUES as PRODUCT_EPILOGUES
from dmuon_tune.problem import Problem
from dmuon_tune.space import choice


@dataclass(frozen=True)
class LibraryConfig:
    """Which of PyTorch's entry points runs the product; they reach different algorithms of the same library."""

    entry: str = choice("baddbmm", ("baddbmm", "addmm"))


EPILOGUES = {"gram": ("none",), "gemm_symmetric": PRODUCT_EPILOGUES, "apply": ("none", "c")}


def refusal(problem: Problem, device: DeviceFingerprint) -> str | None:
    if problem.epilogue not in EPILOGUES[problem.op]:
        return f"{problem.op} has the epilogues {', '.join(EPILOGUES[problem.op])}, asked {problem.epilogue!r}"
    if problem.out_dtype != problem.dtype:
        return f"the library writes its operands' dtype: {problem.dtype} in, {problem.out_dtype} asked"
    return None


def illegality(problem: Problem, config: LibraryConfig, device: DeviceFingerprint) -> str | None:
    if config.entry == "addmm" and problem.batch != 1:
        return "addmm multiplies one matrix, not a batch"
    return None


def product(config: LibraryConfig) -> Callable[[Tensor, Tensor, Tensor, Tensor, float, float], Any]:
    """``multiply(c, left, right, out, alpha, beta)``: out = alpha·left·right + beta·c; beta = 0 ignores c's content."""

    def baddbmm(c: Tensor, left: Tensor, right: Tensor, out: Tensor, alpha: float, beta: float) -> None:
        torch.baddbmm(c, left, right, beta=beta, alpha=alpha, out=out)

    def addmm(c: Tensor, left: Tensor, right: Tensor, out: Tensor, alpha: float, beta: float) -> None:
        torch.addmm(c[0], left[0], right[0], beta=beta, alpha=alpha, out=out[0])

    return addmm if config.entry == "addmm" else baddbmm


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The contiguous CPU tensor that begins there; whoever gave the address keeps the memory alive."""
    memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
