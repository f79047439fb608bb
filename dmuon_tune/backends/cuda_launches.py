"""Portable code of a GPU kernel: cubins (deflated) and the launches of one call, run by the CUDA driver alone."""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from dmuon_tune.errors import said
from dmuon_tune.portable import NotPortableError, PortableCode, UnloadableCodeError

from . import driver
from .cubin import cubin_parameters

ALIGNMENT_BYTES = 16
SCALAR_FORMATS = {"float32": "<f", "int32": "<i", "int64": "<q"}


@dataclass(frozen=True)
class Patch:
    """Where a parameter's bytes depend on a call: at ``at`` stands a ``tensor``'s or ``scratch`` buffer's address plus
    ``add``, or a scalar (``kind`` is its dtype); ``index`` counts the op's arguments, or the scratch buffers."""

    at: int
    kind: str
    index: int
    add: int = 0


@dataclass(frozen=True)
class Parameter:
    """A kernel's parameter: constant ``data`` (hexadecimal) with ``patches``, or the ``tensor_map`` of an argument."""

    data: str = ""
    patches: tuple[Patch, ...] = ()
    tensor_map: driver.TensorMap | None = None
    tensor: int = -1

    @property
    def size_bytes(self) -> int:
        return driver.TENSOR_MAP_BYTES if self.tensor_map else len(self.data) // 2

    @property
    def tensors(self) -> set[int]:
        """The op's arguments whose addresses it holds."""
        return {patch.index for patch in self.patches if patch.kind == "tensor"} | {self.tensor} - {-1}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Parameter:
        given = fields["tensor_map"] or {}
        kept: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
        }
        tensor_map = driver.TensorMap(**kept) if kept else None
        patches = tuple(Patch(**patch) for patch in fields["patches"])
        return cls(fields["data"], patches, tensor_map, fields["tensor"])


@dataclass(frozen=True)
class Kernel:
    """A kernel in the ``image``-th cubin. ``attributes`` are CUfunction_attributes, ``launch_attributes`` pairs of a
    CUlaunchAttributeID and its value (hexadecimal). The tensors of ``aligned`` parameters begin at multiples of 16
    bytes; with others the ``otherwise``-th kernel runs, or none where that is -1."""

    image: int
    name: str
    block: tuple[int, ...]
    smem_bytes: int
    attributes: tuple[tuple[int, int], ...] = ()
    launch_attributes: tuple[tuple[int, str], ...] = ()
    aligned: tuple[int, ...] = ()
    otherwise: int = -1


@dataclass(frozen=True)
class Launch:
    kernel: int
    grid: tuple[int, ...]
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class Scratch:
    """A buffer that each call allocates; the first ``zeroed_bytes`` of it are set to zero."""

    size_bytes: int
    zeroed_bytes: int = 0


@dataclass(frozen=True)
class CudaCall:
    """What one call of the op launches, in order; ``arguments`` are how many the op has, ``images`` the cubins' sizes,
    bytes."""

    arguments: int
    kernels: tuple[Kernel, ...]
    launches: tuple[Launch, ...]
    scratch: tuple[Scratch, ...] = ()
    images: tuple[int, ...] = ()

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> CudaCall:
        kernels = tuple(Kernel(**{
            **kernel, "attributes": tuple(map(tuple, kernel["attributes"])),
            "launch_attributes": tuple(map(tuple, kernel["launch_attributes"])),
        }) for kernel in fields["kernels"])
        launches = tuple(
            Launch(each["kernel"], tuple(each["grid"]), tuple(map(Parameter.from_dict, each["parameters"])))
            for each in fields["launches"]
        )
        scratch = tuple(Scratch(**buffer) for buffer in fields["scratch"])
        return cls(fields["arguments"], kernels, launches, scratch, tuple(fields["images"]))


def places_of(parameters: Sequence[Parameter], arguments: set[int]) -> tuple[int, ...]:
    """Which parameters hold an address of one of these arguments."""
    return tuple(place for place, parameter in enumerate(parameters) if parameter.tensors & arguments)


def cuda_code(call: CudaCall, images: Sequence[bytes]) -> PortableCode:
    """Cubins and what launches them; NotPortableError where a launch does not pass what its kernel takes."""
    for launch in call.launches:
        kernel = call.kernels[launch.kernel]
        for each in (kernel, call.kernels[kernel.otherwise]) if kernel.otherwise >= 0 else (kernel,):
            takes = cubin_parameters(images[each.image]).get(each.name)
            passed = tuple(parameter.size_bytes for parameter in launch.parameters)
            if takes != passed:
                raise NotPortableError(f"{each.name} takes parameters of sizes {takes} and gets {passed} (bytes)")
    whole = replace(call, images=tuple(map(len, images)))
    return PortableCode(CudaLaunchesFormat.name, zlib.compress(b"".join(images), 9), asdict(whole))


class CudaLaunchesFormat:
    name = "cuda-launches"

    def load(self, data: bytes, launch: dict[str, Any], path: Path) -> Callable[..., Any]:
        """Takes contiguous CUDA tensors and floats, runs on torch's current stream, can be captured in a graph."""
        try:
            return _Loaded(CudaCall.from_dict(launch), zlib.decompress(data))
        except (zlib.error, RuntimeError, LookupError, TypeError, ValueError, AssertionError) as error:
            raise UnloadableCodeError(said(error)) from error


class _Loaded:
    """The callable: its code in the driver, its parameters' memory, which one thread at a time writes."""

    def __init__(self, call: CudaCall, data: bytes) -> None:
        self._call = call
        self._lock = Lock()
        driver.enter_context(torch.cuda.current_device())
        images, start = [], 0
        for size in call.images:
            images.append(driver.load_library(data[start : start + size]))
            start += size
        self._kernels = [driver.get_kernel(images[kernel.image], kernel.name) for kernel in call.kernels]
        self._launches = [_PreparedLaunch(launch, call.kernels) for launch in call.launches]
        self._prepared: set[int] = set()
        self._prepare(torch.cuda.current_device())

    def _prepare(self, device: int) -> None:
        for kernel, handle in zip(self._call.kernels, self._kernels, strict=True):
            driver.prepare(handle, dict(kernel.attributes), device)
        self._prepared.add(device)

    def __call__(self, *arguments: Any) -> None:
        if len(arguments) != self._call.arguments:
            raise TypeError(f"takes {self._call.arguments} arguments, got {len(arguments)}")
        device = torch.cuda.current_device()
        if device not in self._prepared:
            driver.enter_context(device)
            self._prepare(device)
        values = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
        buffers = [_allocated(buffer) for buffer in self._call.scratch]
        scratch = [buffer.data_ptr() for buffer in buffers]
        stream = torch.cuda.current_stream().cuda_stream
        with self._lock:
            for launch in self._launches:
                launch.run(values, scratch, self._kernels, stream, device)


def _allocated(scratch: Scratch) -> Tensor:
    buffer = torch.empty(scratch.size_bytes, dtype=torch.uint8, device="cuda")
    if scratch.zeroed_bytes:
        buffer[: scratch.zeroed_bytes].zero_()
    return buffer


class _PreparedLaunch:
    """One launch with memory for its parameters; where an address has not changed its tensor map is not made again."""

    def __init__(self, launch: Launch, kernels: Sequence[Kernel]) -> None:
        first = kernels[launch.kernel]
        self._choices = [launch.kernel] + ([first.otherwise] if first.otherwise >= 0 else [])
        self._aligned = {index for place in first.aligned for index in launch.parameters[place].tensors}
        self._configs = [_config(launch, kernels[choice]) for choice in self._choices]
        offsets, size = [], 0
        for parameter in launch.parameters:
            alignment = driver.TENSOR_MAP_ALIGNMENT
            offsets.append(size)
            size += -(-parameter.size_bytes // alignment) * alignment
        self._memory = (ctypes.c_ubyte * (size + driver.TENSOR_MAP_ALIGNMENT))()
        base = -ctypes.addressof(self._memory) % driver.TENSOR_MAP_ALIGNMENT
        begin = ctypes.addressof(self._memory) + base
        self._pointers = (ctypes.c_void_p * max(1, len(offsets)))(*(begin + offset for offset in offsets))
        self._patches: list[tuple[int, str, str, int, int]] = []
        self._maps: list[tuple[driver.TensorMap, int, int]] = []
        self._encoded: dict[int, int] = {}
        for parameter, offset in zip(launch.parameters, offsets, strict=True):
            if parameter.tensor_map:
                self._maps.append((parameter.tensor_map, parameter.tensor, begin + offset))
                continue
            constant = bytes.fromhex(parameter.data)
            ctypes.memmove(begin + offset, constant, len(constant))
            for patch in parameter.patches:
                kind = SCALAR_FORMATS.get(patch.kind, "<Q")
                self._patches.append((base + offset + patch.at, kind, patch.kind, patch.index, patch.add))

    def run(
        self, values: Sequence[Any], scratch: Sequence[int], kernels: Sequence[ctypes.c_void_p], stream: int,
        device: int,
    ) -> None:
        fits = all(values[index] % ALIGNMENT_BYTES == 0 for index in self._aligned)
        if not fits and len(self._choices) == 1:
            raise ValueError(f"takes tensors that begin at multiples of {ALIGNMENT_BYTES} bytes")
        choice = 0 if fits else 1
        for place, kind, source, index, add in self._patches:
            value = scratch[index] + add if source == "scratch" else values[index]
            struct.pack_into(kind, self._memory, place, value + add if source == "tensor" else value)
        for tensor_map, index, at in self._maps:
            if self._encoded.get(at) != values[index]:
                driver.encode(tensor_map, values[index], at)
                self._encoded[at] = values[index]
        config = self._configs[choice]
        config.stream = stream
        driver.launch(config, kernels[self._choices[choice]], self._pointers, device)


def _config(launch: Launch, kernel: Kernel) -> driver.LaunchConfig:
    attributes = [(identity, bytes.fromhex(value)) for identity, value in kernel.launch_attributes]
    return driver.config_of(launch.grid, kernel.block, kernel.smem_bytes, attributes)


FORMAT = CudaLaunchesFormat()
