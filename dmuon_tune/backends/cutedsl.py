"""CuTe DSL: compiles a kernel body for sm_90a ahead of its first call, without a GPU."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from pathlib import Path
from typing import Any

from dmuon_tune.device import DeviceFingerprint, Toolchain
from dmuon_tune.portable import PortableCode
from dmuon_tune.problem import Problem
from dmuon_tune.spec import Argument

from . import CompiledKernel, cutedsl_launch, installed_version
from .cubin import cubin_resources
from .cuda_launches import cuda_code
from .home import ensure_home

TARGET = "sm_90a"
PACKAGES = ("apache-tvm-ffi", "nvidia-cutlass-dsl")


class CuteDslBackend:
    name = "cutedsl"

    def unavailable(self, device: DeviceFingerprint) -> str | None:
        if importlib.util.find_spec("cutlass") is None or importlib.util.find_spec("tvm_ffi") is None:
            return "CuTe DSL is not installed; pip install 'dmuon-tune[cutedsl]'"
        if device.arch != "sm_90":
            return f"the CuTe DSL kernels use Hopper's TMA and wgmma and run on sm_90 alone, not on {device.arch}"
        return None

    def toolchain(self, device: DeviceFingerprint) -> Toolchain:
        """Versions of the DSL and of the call interface that its host code is generated for."""
        return Toolchain(self.name, tuple((package, installed_version(package)) for package in PACKAGES))

    def load(self) -> None:
        """Import CuTe DSL and its call interface."""
        ensure_home()
        import cutlass.cute  # noqa: F401
        import tvm_ffi  # noqa: F401

    def compile(self, program: Any, problem: Problem, device: DeviceFingerprint) -> CompiledKernel:
        """``program``: what a kernel's build returned, with ``entry``, ``arguments()`` and ``smem_bytes``.

        The launch takes torch CUDA tensors and floats in the op's order and runs on torch's current stream.
        """
        started = time.perf_counter()
        launch = _compiled(program)
        compile_s = time.perf_counter() - started
        resources = {"smem_bytes": program.smem_bytes, "compile_s": round(compile_s, 3)}
        return CompiledKernel(launch, resources | cubin_resources(launch.__cubin__))

    def portable(
        self, program: Any, problem: Problem, device: DeviceFingerprint, arguments: tuple[Argument, ...]
    ) -> PortableCode:
        """The cubin with what the DSL's own host code launches; recording that needs a C compiler."""
        compiled = _compiled(program)
        with tempfile.TemporaryDirectory() as folder:
            exported = Path(folder, "kernel.o")
            compiled.export_to_c(str(exported), function_name=cutedsl_launch.FUNCTION)
            cubin = bytes(compiled.__cubin__)
            call = cutedsl_launch.record(exported, _host_library(), cubin, arguments, device.smem_per_block_bytes)
        return cuda_code(call, [cubin])


def _compiled(program: Any) -> Any:
    import cutlass.cute as cute

    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    with tempfile.TemporaryDirectory() as folder:
        # --keep-cubin also writes a file, which belongs in no working directory.
        options = f"--enable-tvm-ffi --gpu-arch {TARGET} --keep-cubin --dump-dir {folder}"
        return cute.compile(program.entry, *program.arguments(), stream, options=options)


def _host_library() -> Path:
    """What CuTe DSL's exported host code is linked with."""
    import cutlass

    return Path(cutlass.__file__).resolve().parents[2] / "lib" / "libcuda_dialect_runtime_static.a"


BACKEND = CuteDslBackend()
