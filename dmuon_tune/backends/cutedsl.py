"""CuTe DSL: compiles a kernel body for sm_90a ahead of its first call, without a GPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import struct
import tempfile
import time
from typing import Any

from dmuon_tune.device import DeviceFingerprint, Toolchain
from dmuon_tune.problem import Problem

from . import CompiledKernel

TARGET = "sm_90a"
PACKAGES = ("apache-tvm-ffi", "nvidia-cutlass-dsl")

# Entries of a cubin's .nv.info section: CUDA's EIATTR_REGCOUNT and EIATTR_FRAME_SIZE, value format "sized".
_SIZED, _REGISTER_COUNT, _FRAME_BYTES = 0x04, 0x2F, 0x11


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
        return Toolchain(self.name, tuple((package, importlib.metadata.version(package)) for package in PACKAGES))

    def compile(self, program: Any, problem: Problem, device: DeviceFingerprint) -> CompiledKernel:
        """``program``: what a kernel's build returned, with ``entry``, ``arguments()`` and ``smem_bytes``.

        The launch takes torch CUDA tensors and floats in the op's order and runs on torch's current stream.
        """
        import cutlass.cute as cute

        stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            # --keep-cubin also writes a file, which belongs in no working directory.
            options = f"--enable-tvm-ffi --gpu-arch {TARGET} --keep-cubin --dump-dir {folder}"
            launch = cute.compile(program.entry, *program.arguments(), stream, options=options)
            compile_s = time.perf_counter() - started
            resources = {"smem_bytes": program.smem_bytes, "compile_s": round(compile_s, 3)}
            resources |= cubin_resources(launch.__cubin__)
        return CompiledKernel(launch, resources)


def cubin_resources(cubin: bytes) -> dict[str, int]:
    """``registers`` a thread and ``spill_bytes`` (stack frame) of a cubin's largest kernel, read from its ELF notes."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry_bytes) for i in range(count)]
    names = sections[names_index][4]
    found = {"registers": 0, "spill_bytes": 0}
    for section in sections:
        start = names + section[0]
        if cubin[start : cubin.index(b"\0", start)] != b".nv.info":
            continue
        at, end = section[4], section[4] + section[5]
        while at < end:
            value_format, attribute, size = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if value_format != _SIZED:
                continue
            field = {_REGISTER_COUNT: "registers", _FRAME_BYTES: "spill_bytes"}.get(attribute)
            if field:
                found[field] = max(found[field], struct.unpack_from("<II", cubin, at)[1])
            at += size
    return found


BACKEND = CuteDslBackend()
