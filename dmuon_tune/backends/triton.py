"""Triton: specializes and compiles jit functions ahead of their first call, for any NVIDIA GPU and without one."""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from dmuon_tune.device import DeviceFingerprint, Toolchain
from dmuon_tune.portable import PortableCode
from dmuon_tune.problem import Problem
from dmuon_tune.spec import Argument

from . import CompiledKernel, installed_version, triton_launch
from .cubin import cubin_resources
from .cuda_launches import cuda_code
from .home import ensure_home

ALIGNMENT_BYTES = 16
OLDEST_SM = 80
C_COMPILERS = ("gcc", "clang", "cc")  # Triton compiles its launcher at the first launch


class TritonBackend:
    name = "triton"

    def unavailable(self, device: DeviceFingerprint) -> str | None:
        if device.kind != "cuda":
            return "the Triton kernels run on NVIDIA GPUs alone, not on a CPU"
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed; pip install 'dmuon-tune[triton]'"
        if device.sm < OLDEST_SM:
            return f"the Triton kernels need sm_{OLDEST_SM} or newer, not {device.arch}"
        if not any(map(shutil.which, filter(None, (os.environ.get("CC"), *C_COMPILERS)))):
            return "Triton's launcher needs a C compiler; install gcc, or set CC to one"
        return None

    def toolchain(self, device: DeviceFingerprint) -> Toolchain:
        """Triton's version, which fixes the ptxas that it ships."""
        return Toolchain(self.name, (("triton", installed_version("triton")),))

    def load(self) -> None:
        """Import Triton, with a cache folder that can be written."""
        ensure_home()
        import triton.compiler  # noqa: F401

    def compile(self, program: Any, problem: Problem, device: DeviceFingerprint) -> CompiledKernel:
        """``program``: a kernel's ``kernels`` and ``host`` (kernel_specs/_triton.py), compiled for ``device.arch``.

        The launch takes contiguous torch tensors of any alignment, and floats, in the op's order; it runs on torch's
        current stream and can be captured in a CUDA graph. Where this process has that GPU the code is loaded at once.
        """
        started = time.perf_counter()
        compiled = [_compile(kernel, device, kernel.aligned) for kernel in program.kernels]
        compile_s = time.perf_counter() - started
        if torch.cuda.is_available() and torch.cuda.get_device_capability() == divmod(device.sm, 10):
            for binary in compiled:
                binary[1, 1, 1]  # loads the code: a first launch inside a graph's capture could not
        runs = [_run(kernel, binary, device) for kernel, binary in zip(program.kernels, compiled, strict=True)]
        resources: dict[str, Any] = {"compile_s": round(compile_s, 3)}
        needs = [{**cubin_resources(binary.asm["cubin"]), "smem_bytes": binary.metadata.shared} for binary in compiled]
        resources |= {name: max(need[name] for need in needs) for name in needs[0]}
        return CompiledKernel(program.host(*runs), resources)

    def portable(
        self, program: Any, problem: Problem, device: DeviceFingerprint, arguments: tuple[Argument, ...]
    ) -> PortableCode:
        """Each kernel's cubin for aligned tensors and for others, with what the host code launches."""
        binaries = [
            (_compile(kernel, device, kernel.aligned), _compile(kernel, device, ()) if kernel.aligned else None)
            for kernel in program.kernels
        ]
        return cuda_code(*triton_launch.record(program, binaries, arguments))


def _compile(kernel: Any, device: DeviceFingerprint, aligned: tuple[str, ...]) -> Any:
    """The compiled kernel, its ``aligned`` pointers taken to be multiples of 16 bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.function.arg_names
    if names != [*kernel.types, *kernel.constants]:
        raise ValueError(f"{kernel.function.__name__} takes {names}, not {[*kernel.types, *kernel.constants]}")
    source = ASTSource(
        fn=kernel.function,
        signature={**kernel.types, **dict.fromkeys(kernel.constants, "constexpr")},
        constexprs={(names.index(name),): value for name, value in kernel.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", ALIGNMENT_BYTES]] for name in aligned},
    )
    options = {
        "num_warps": kernel.warps, "num_stages": kernel.stages, "enable_fp_fusion": True, **kernel.options,
    }
    return triton.compile(source, target=GPUTarget("cuda", device.sm, 32), options=options)


def _run(kernel: Any, binary: Any, device: DeviceFingerprint) -> Callable[..., None]:
    """``run(grid, *arguments)`` on the current stream, by the variant that the pointers' alignment allows."""
    constants = tuple(kernel.constants.values())
    places = [list(kernel.types).index(name) for name in kernel.aligned]
    unaligned = cache(lambda: _compile(kernel, device, ()))

    def run(grid: tuple[int, int, int], *arguments: Any) -> None:
        fits = all(arguments[place].data_ptr() % ALIGNMENT_BYTES == 0 for place in places)
        (binary if fits else unaligned())[grid](*arguments, *constants)

    return run


BACKEND = TritonBackend()
