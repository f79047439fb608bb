"""QuACK: Dao-AILab's own CuTe DSL kernels (package quack-kernels), compiled for Hopper as its authors wrote them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import time
from typing import Any

from dmuon_tune.device import DeviceFingerprint, Toolchain
from dmuon_tune.problem import Problem

from . import CompiledKernel
from .home import ensure_home

VERSION = "0.5.0"  # the kernels are called below QuACK's public interface, which fixes the tile
PACKAGES = ("apache-tvm-ffi", "nvidia-cutlass-dsl", "quack-kernels")
INSTALL = "pip install 'dmuon-tune[quack]'"


class QuackBackend:
    name = "quack"
    peer = True  # another project's kernels: their absence is no gap of this one

    def unavailable(self, device: DeviceFingerprint) -> str | None:
        try:
            found = importlib.metadata.version("quack-kernels")
        except importlib.metadata.PackageNotFoundError:
            return f"QuACK is not installed; {INSTALL}"
        if found != VERSION:
            return f"quack-kernels {found} is installed, {VERSION} is needed; {INSTALL}"
        if importlib.util.find_spec("cutlass") is None or importlib.util.find_spec("tvm_ffi") is None:
            return f"QuACK needs CuTe DSL, which is not installed; {INSTALL}"
        if device.arch != "sm_90":
            return f"QuACK's tiles are listed for Hopper (sm_90) alone, not for {device.arch}"
        return None

    def toolchain(self, device: DeviceFingerprint) -> Toolchain:
        """Versions of QuACK, of the DSL and of the call interface that its host code is generated for."""
        return Toolchain(self.name, tuple((package, importlib.metadata.version(package)) for package in PACKAGES))

    def load(self) -> None:
        """Import QuACK's symmetric product, and with it CuTe DSL."""
        ensure_home()
        os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when cutlass is imported; QuACK's options name none
        import quack.gemm_symmetric  # noqa: F401

    def compile(self, program: Any, problem: Problem, device: DeviceFingerprint) -> CompiledKernel:
        """``program``: what a kernel's build returned, with ``compile()`` and ``launcher(compiled)``.

        The launch takes torch CUDA tensors and floats in the op's order and runs on torch's current stream.
        """
        started = time.perf_counter()
        compiled = program.compile()
        compile_s = round(time.perf_counter() - started, 3)
        return CompiledKernel(program.launcher(compiled), {"compile_s": compile_s})


BACKEND = QuackBackend()
