"""TileLang: turns a primitive function into a callable, through nvcc for a GPU or the C++ compiler for a CPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from dmuon_tune.device import DeviceFingerprint, Toolchain
from dmuon_tune.portable import NotPortableError, PortableCode
from dmuon_tune.problem import Problem
from dmuon_tune.spec import Argument

from . import CompiledKernel, tilelang_launch
from .cubin import cubin_resources
from .cuda_launches import CudaCall, cuda_code
from .home import ensure_home
from .shared_library import library_code

CPU_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-w")
CPP_COMPILERS = ("g++", "clang++", "c++")
ARCH_SPECIFIC_FROM = 90  # wgmma and its successors exist in the ``a`` variants of an architecture alone


class TileLangBackend:
    name = "tilelang"

    def unavailable(self, device: DeviceFingerprint) -> str | None:
        """What is missing: TileLang itself, nvcc for a GPU, a C++ compiler for a CPU."""
        if importlib.util.find_spec("tilelang") is None:
            return "TileLang is not installed; pip install 'dmuon-tune[tilelang]'"
        if device.kind == "cuda" and _nvcc() is None:
            return "TileLang needs nvcc; install the CUDA toolkit, or set CUDA_HOME to it"
        if device.kind == "cpu" and _cpp_compiler() is None:
            return "TileLang's CPU target needs a C++ compiler; install g++, or set CXX to one"
        return None

    def toolchain(self, device: DeviceFingerprint) -> Toolchain:
        """Versions of TileLang, TVM FFI and the compiler that runs last."""
        return _toolchain(device.kind, os.environ.get("CUDA_HOME"), os.environ.get("CXX"))

    def load(self) -> None:
        """Import TileLang, with a cache folder that can be written."""
        _import_quietly()

    def compile(self, program: Any, problem: Problem, device: DeviceFingerprint) -> CompiledKernel:
        """``program``: the primitive function, the compiler's switches, a block's dynamic shared memory in bytes.

        The launch takes contiguous torch tensors that begin at a multiple of 16 bytes, and floats, in the op's order;
        on a GPU it runs on torch's current stream and can be captured in a CUDA graph.
        """
        begin = time.perf_counter()
        kernel, smem_bytes = _compiled(program, device), program[2]
        launch = _cuda_launch(kernel) if device.kind == "cuda" else kernel.torch_function
        resources: dict[str, Any] = {"compile_s": round(time.perf_counter() - begin, 3)}
        if device.kind == "cuda":
            cubin = _cubin(kernel)
            resources |= {"smem_bytes": smem_bytes} | (cubin_resources(cubin) if cubin else {})
        return CompiledKernel(launch, resources)

    def portable(
        self, program: Any, problem: Problem, device: DeviceFingerprint, arguments: tuple[Argument, ...]
    ) -> PortableCode:
        """The cubin with its launch, for any GPU; for this CPU the shared library that the C++ compiler made."""
        kernel = _compiled(program, device)
        if device.kind == "cpu":
            kinds = ["float32" if argument.role == "scalar" else "tensor" for argument in arguments]
            return library_code(Path(kernel.adapter.lib_generator.libpath), "call", kinds)
        cubin = _cubin(kernel)
        if cubin is None:
            raise NotPortableError("TileLang's CUDA module does not hand out its cubin")
        return cuda_code(recorded(program, device, arguments, str(kernel.get_kernel_source())), [cubin])


def recorded(
    program: Any, device: DeviceFingerprint, arguments: tuple[Argument, ...], source: str | None = None
) -> CudaCall:
    """What a call of the program launches on a GPU; NotPortableError where it lowers to other code than ``source``."""
    lowered = _lowered(program, device)
    if source is not None and str(lowered.kernel_source) != source:
        raise NotPortableError("it lowers to other code each time")
    buffers = program[0].buffer_map
    names = [buffers[each].data.name if each in buffers else each.name for each in program[0].params]
    return tilelang_launch.record(lowered, names, arguments)


def _compiled(program: Any, device: DeviceFingerprint) -> Any:
    function, pass_configs, _ = program
    return _import_quietly().compile(
        function, pass_configs=pass_configs, compile_flags=_compile_flags(device), verbose=False, **_target(device)
    )


def _lowered(program: Any, device: DeviceFingerprint) -> Any:
    """The program's host and device code, as it was compiled from, without compiling it again."""
    tilelang = _import_quietly()
    function, pass_configs, _ = program
    target = tilelang.tvm.target.Target(_target(device)["target"])
    with tilelang.tvm.transform.PassContext(opt_level=3, config=dict(pass_configs or {})), target:
        return tilelang.lower(function, target=target)


def _target(device: DeviceFingerprint) -> dict[str, Any]:
    if device.kind == "cpu":
        return {"target": "c", "target_host": "c", "execution_backend": "cython"}
    arch = f"{device.arch}a" if device.sm >= ARCH_SPECIFIC_FROM else device.arch
    return {"target": {"kind": "cuda", "arch": arch}, "execution_backend": "tvm_ffi"}


def _compile_flags(device: DeviceFingerprint) -> list[str]:
    """Compiler flags, and a macro that no code reads.

    TileLang keeps compiled kernels on disk under a hash of the program, its switches and these flags, not of the
    compiler or the CPU; the macro adds both, so a shared home directory never serves another machine's code.
    """
    versions = _toolchain(device.kind, os.environ.get("CUDA_HOME"), os.environ.get("CXX")).label()
    stamp = re.sub(r"[^A-Za-z0-9_.]+", "_", versions if device.kind == "cuda" else f"{versions} {device.arch}")
    return [*(CPU_FLAGS if device.kind == "cpu" else ()), f"-DDMUON_TUNE_TOOLCHAIN={stamp}"]


@cache
def _import_quietly() -> Any:
    """TileLang with its log of every compilation off; errors still reach the log."""
    ensure_home()
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    import tilelang  # type: ignore[import-untyped, unused-ignore]

    logger = logging.getLogger("tilelang")
    logger.setLevel(logging.ERROR)
    for handler in logger.handlers:  # its cache lowers its own logger's level again
        if type(handler).__module__.startswith("tilelang"):  # another's handler may serve other loggers too
            handler.setLevel(logging.ERROR)
    if not _writable(Path(tilelang.env.TILELANG_CACHE_DIR)):
        tilelang.disable_cache()
    return tilelang


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _cuda_launch(kernel: Any) -> Callable[..., Any]:
    """TVM FFI's entry point itself: it takes torch tensors and floats and runs on torch's current stream."""
    launch: Callable[..., Any] = _module(kernel)["main"]
    return launch


def _module(kernel: Any) -> Any:
    """The loaded module: fresh from the compiler in an executable, from TileLang's disk cache bare."""
    held = kernel.adapter.get_exportable_executable()
    return held.jit() if hasattr(type(held), "jit") else held


def _cubin(kernel: Any) -> bytes | None:
    """A compiled kernel's cubin; None where the CUDA module does not hand it out."""
    for module in _module(kernel).imports:
        if module.kind == "cuda":
            try:
                module.inspect_source("cubin")
            except UnicodeDecodeError as error:  # TVM decodes the ELF image as text; the error holds its bytes
                return bytes(error.object)
    return None


def _nvcc() -> str | None:
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if home:
            return shutil.which("nvcc", path=os.path.join(home, "bin"))
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def _cpp_compiler() -> str | None:
    named = os.environ.get("CXX") or os.environ.get("CC")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, CPP_COMPILERS)), None)


@cache
def _toolchain(kind: str, cuda_home: str | None, cxx: str | None) -> Toolchain:
    versions = {name: _installed(name) for name in ("apache-tvm-ffi", "tilelang")}
    compiler = _nvcc() if kind == "cuda" else _cpp_compiler()
    versions["nvcc" if kind == "cuda" else "c++"] = _compiler_version(compiler)
    return Toolchain("tilelang", tuple(sorted(versions.items())))


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError as error:
        raise ModuleNotFoundError(f"{distribution} is not installed; pip install 'dmuon-tune[tilelang]'") from error


def _compiler_version(compiler: str | None) -> str:
    if compiler is None:
        return "none"
    text = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    release = re.search(r"\bV(\d+(?:\.\d+)+)", text)  # nvcc's line; others open with their name and version
    return release.group(1) if release else next(iter(text.splitlines()), "unknown").strip()


BACKEND = TileLangBackend()
