"""What a Triton kernel's ``build`` returns: kernels with the types of their arguments, and their host code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dmuon_tune.device import DeviceFingerprint

POINTERS = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32", "int64": "*i64"}


OVERLAP_FROM = 90  # the first architecture with programmatic dependent launch


def overlap(device: DeviceFingerprint) -> tuple[bool, dict[str, bool]]:
    """Whether kernels here may start before the one in front ends, and the compiler's options for those that do."""
    overlaps = device.sm >= OVERLAP_FROM
    return overlaps, {"launch_pdl": True} if overlaps else {}


@dataclass(frozen=True)
class TritonKernel:
    """A ``triton.jit`` function specialized ahead of its first call.

    ``types`` gives each run-time parameter its Triton type (``*fp16``, ``i32``, ``fp32``, ...) in the function's order,
    ``constants`` each ``tl.constexpr`` its value; the function has its constexpr parameters last. Tensors named in
    ``aligned`` are taken to begin at multiples of 16 bytes; a call with another address runs a variant without that.
    """

    function: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 3
    aligned: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TritonProgram:
    """Kernels, and ``host``, which gets one ``run(grid, *arguments)`` a kernel and returns the op's launch.

    ``arguments`` of a run are the kernel's run-time parameters in order, ``grid`` is a tuple of three integers.
    """

    kernels: tuple[TritonKernel, ...]
    host: Callable[..., Callable[..., Any]]
