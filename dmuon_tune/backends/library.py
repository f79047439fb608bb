"""The vendor library: programs are Python callables over PyTorch's products."""

from __future__ import annotations

from typing import Any

import torch

from dmuon_tune.device import DeviceFingerprint, Toolchain
from dmuon_tune.problem import Problem

from . import CompiledKernel


class LibraryBackend:
    name = "library"

    def unavailable(self, device: DeviceFingerprint) -> str | None:
        return None

    def toolchain(self, device: DeviceFingerprint) -> Toolchain:
        """PyTorch's version with its build tag (+cu130, +cpu), which fixes the BLAS it ships."""
        return Toolchain(self.name, (("torch", torch.__version__),))

    def compile(self, program: Any, problem: Problem, device: DeviceFingerprint) -> CompiledKernel:
        return CompiledKernel(program)


BACKEND = LibraryBackend()
