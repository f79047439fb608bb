"""What a Triton program launches, as data: its host code is called once with stand-ins that note what it does."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dmuon_tune.portable import NotPortableError
from dmuon_tune.spec import Argument

from .cubin import cubin_parameters
from .cuda_launches import CudaCall, Kernel, Launch, Parameter, Patch, Scratch
from .driver import COOPERATIVE, DEFAULT_DYNAMIC_SMEM_BYTES, MAX_DYNAMIC_SMEM, PROGRAMMATIC_SERIALIZATION

WARP = 32
SCALARS = {"fp32": "float32", "i32": "int32", "i64": "int64"}
CONSTANTS = {"fp32": "<f", "i32": "<i", "i64": "<q"}
POINTER_BYTES = 8
NO_BUFFER = Parameter(bytes(POINTER_BYTES).hex())
ON = struct.pack("<i", 1).hex()
ALLOCATING = ("aten.empty.memory_format", "aten.new_empty.default")
HARMLESS = (*ALLOCATING, "aten.slice.Tensor", "aten.detach.default")


def record(
    program: Any, binaries: Sequence[tuple[Any, Any | None]], arguments: Sequence[Argument]
) -> tuple[CudaCall, list[bytes]]:
    """A call of a program's host code as data, and the cubins: of each kernel the binary, and the one for
    tensors that are not aligned where that is another.

    The host code runs twice on tensors without memory and other scalars: what differs between the two beside what came
    of an argument cannot be kept. Raises NotPortableError then.
    """
    first, second = (_Recording(program, arguments, number) for number in range(2))
    if (first.launches, first.scratch) != (second.launches, second.scratch):
        raise NotPortableError("its host code computes with the scalars")
    images = [binary.asm["cubin"] for pair in binaries for binary in pair if binary is not None]
    kernels: list[Kernel] = []
    places: list[int] = []  # of each of the program's kernels among these
    for kernel, (fits, others) in zip(program.kernels, binaries, strict=True):
        places.append(len(kernels))
        kernels.append(_kernel(len(kernels), fits))
        if others is not None:
            aligned = tuple(list(kernel.types).index(name) for name in kernel.aligned)
            kernels[-1] = replace(kernels[-1], aligned=aligned, otherwise=len(kernels))
            kernels.append(_kernel(len(kernels), others))
    launches = []
    for program_place, grid, parameters in first.launches:
        place = places[program_place]
        sizes = cubin_parameters(images[place])[kernels[place].name]
        own = (NO_BUFFER for _ in sizes[len(parameters) :])  # Triton's own buffers, of which these kernels have none
        launches.append(Launch(place, grid, (*parameters, *own)))
    call = CudaCall(len(arguments), tuple(kernels), tuple(launches), tuple(first.scratch))
    return call, images


def _kernel(image: int, binary: Any) -> Kernel:
    metadata = binary.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.num_ctas != 1:
        raise NotPortableError(f"{metadata.name} needs scratch memory of Triton's, or a cluster")
    attributes = ((MAX_DYNAMIC_SMEM, metadata.shared),) if metadata.shared > DEFAULT_DYNAMIC_SMEM_BYTES else ()
    wanted = ((PROGRAMMATIC_SERIALIZATION, metadata.launch_pdl), (COOPERATIVE, metadata.launch_cooperative_grid))
    launch_attributes = tuple((identity, ON) for identity, is_on in wanted if is_on)
    return Kernel(
        image, metadata.name, (WARP * metadata.num_warps, 1, 1), metadata.shared, attributes, launch_attributes
    )


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """One call of a program's host code: its ``launches`` (kernel, grid, parameters) and ``scratch`` buffers."""

    def __init__(self, program: Any, arguments: Sequence[Argument], number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.launches: list[tuple[int, tuple[int, ...], list[Parameter]]] = []
        self.scratch: list[Scratch] = []
        self._buffers: list[Tensor] = []
        self._values = [_stand_in(argument, place, number) for place, argument in enumerate(arguments)]
        runs = [self._run(place, list(kernel.types.values())) for place, kernel in enumerate(program.kernels)]
        host = program.host(*runs)
        with self:
            host(*self._values)

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        name = str(function)
        if name == "aten.zero_.default":
            self._zeroed(arguments[0])
        elif name not in HARMLESS:
            raise NotPortableError(f"its host code calls {name}")
        given = keywords or {}
        if name in ALLOCATING:
            buffer = function(*arguments, **{**given, "device": "meta"})
            self._buffers.append(buffer)
            self.scratch.append(Scratch(buffer.nbytes))
            return buffer
        return function(*arguments, **given)

    def _zeroed(self, view: Tensor) -> None:
        place = self._scratch_of(view)
        if place is None or view.storage_offset() or not view.is_contiguous() or self.launches:
            raise NotPortableError("its host code clears more than the beginning of a buffer of its own")
        self.scratch[place] = replace(self.scratch[place], zeroed_bytes=view.nbytes)

    def _scratch_of(self, tensor: Tensor) -> int | None:
        storages = [buffer.untyped_storage()._cdata for buffer in self._buffers]
        own = tensor.untyped_storage()._cdata
        return storages.index(own) if own in storages else None

    def _run(self, place: int, types: Sequence[str]) -> Callable[..., None]:
        def run(grid: tuple[int, ...], *given: Any) -> None:
            parameters = [self._parameter(value, name) for value, name in zip(given, types, strict=True)]
            self.launches.append((place, tuple(grid), parameters))

        return run

    def _parameter(self, value: Any, type_name: str) -> Parameter:
        index = next((place for place, own in enumerate(self._values) if own is value), None)
        if type_name.startswith("*"):
            zero = bytes(POINTER_BYTES).hex()
            if index is not None:
                return Parameter(zero, (Patch(0, "tensor", index),))
            buffer = self._scratch_of(value) if isinstance(value, Tensor) else None
            if buffer is None or value.storage_offset():
                raise NotPortableError("it passes a tensor that is neither an argument nor a buffer of its own")
            return Parameter(zero, (Patch(0, "scratch", buffer),))
        if type_name not in SCALARS:
            raise NotPortableError(f"it passes a value of type {type_name}")
        if index is not None:
            empty = bytes(struct.calcsize(CONSTANTS[type_name])).hex()
            return Parameter(empty, (Patch(0, SCALARS[type_name], index),))
        return Parameter(struct.pack(CONSTANTS[type_name], value).hex())


def _stand_in(argument: Argument, place: int, number: int) -> Any:
    """An argument without memory; a scalar is an object of its own, told from equal values by identity."""
    if argument.role == "scalar":
        return float(f"{place + 1}.{number}7")
    if argument.separate:
        return torch.empty(argument.shape[:1], dtype=torch.int64, device="meta")
    return torch.empty(argument.shape, dtype=getattr(torch, argument.dtype), device="meta")
