"""Calls the CUDA driver (libcuda) by ctypes: loads cubins, encodes tensor maps, launches kernels, shares memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

from dmuon_tune.portable import UnloadableCodeError

LIBRARY = "libcuda.so.1"
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
TENSOR_MAP_BYTES = TENSOR_MAP_ALIGNMENT = 128  # CUtensorMap; cuTensorMapEncodeTiled wants 64
MAX_DYNAMIC_SMEM = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
PORTABLE_AND_MAPPED = 3  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP
HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
DEFAULT_DYNAMIC_SMEM_BYTES = 48 * 1024  # more needs the attribute; CUDA C++ Programming Guide, compute capability 7.x+
# CUlaunchAttributeID
COOPERATIVE, CLUSTER_DIMENSION, PROGRAMMATIC_SERIALIZATION = 2, 4, 6
ATTRIBUTE_VALUE_BYTES = 64


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", c_uint), ("pad", c_uint), ("value", ctypes.c_ubyte * ATTRIBUTE_VALUE_BYTES)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", c_uint * 3), ("block", c_uint * 3), ("smem_bytes", c_uint), ("stream", c_void_p),
        ("attributes", POINTER(LaunchAttribute)), ("attribute_count", c_uint),
    ]


class MemoryHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


@dataclass(frozen=True)
class TensorMap:
    """What cuTensorMapEncodeTiled needs besides the address: innermost axis first, strides in bytes of all but it."""

    dtype: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int
    swizzle: int
    l2_promotion: int
    fill: int


class DriverError(RuntimeError):
    """A call of the CUDA driver that failed; ``code`` is its CUresult."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} failed: {_error_name(code)}")
        self.code = code


@cache
def _function(name: str) -> Any:
    """One of libcuda's, with the types that it takes; what a driver lacks only those miss who call it."""
    try:
        function = getattr(ctypes.CDLL(LIBRARY), name)
    except (OSError, AttributeError) as error:
        raise UnloadableCodeError(f"the CUDA driver is missing or too old: {error}") from error
    function.argtypes = _SIGNATURES[name]
    return function


_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuCtxGetCurrent": [POINTER(c_void_p)],
    "cuCtxSetCurrent": [c_void_p],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuLibraryLoadData": [POINTER(c_void_p), c_void_p, c_void_p, c_void_p, c_uint, c_void_p, c_void_p, c_uint],
    "cuLibraryGetKernel": [POINTER(c_void_p), c_void_p, c_char_p],
    "cuKernelGetFunction": [POINTER(c_void_p), c_void_p],
    "cuKernelSetAttribute": [c_int, c_int, c_void_p, c_int],
    "cuTensorMapEncodeTiled": [
        c_void_p, c_int, c_uint32, c_void_p, POINTER(c_uint64), POINTER(c_uint64), POINTER(c_uint32),
        POINTER(c_uint32), c_int, c_int, c_int, c_int,
    ],
    "cuLaunchKernelEx": [POINTER(LaunchConfig), c_void_p, POINTER(c_void_p), c_void_p],
    "cuMemAlloc_v2": [POINTER(c_uint64), c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuIpcGetMemHandle": [POINTER(MemoryHandle), c_uint64],
    "cuIpcOpenMemHandle_v2": [POINTER(c_uint64), MemoryHandle, c_uint],
    "cuIpcCloseMemHandle": [c_uint64],
    "cuMemHostRegister_v2": [c_void_p, c_size_t, c_uint],
    "cuMemHostUnregister": [c_void_p],
    "cuMemHostGetDevicePointer_v2": [POINTER(c_uint64), c_void_p, c_uint],
    "cuMemcpyDtoDAsync_v2": [c_uint64, c_uint64, c_size_t, c_void_p],
    "cuStreamWaitValue32_v2": [c_void_p, c_uint64, c_uint32, c_uint],
    "cuStreamWriteValue32_v2": [c_void_p, c_uint64, c_uint32, c_uint],
}


def _call(name: str, *arguments: Any) -> None:
    code = _function(name)(*arguments)
    if code:
        raise DriverError(name, code)


def _error_name(code: int) -> str:
    text = c_char_p()
    _function("cuGetErrorName")(code, byref(text))
    return f"{(text.value or b'error').decode()} ({code})"


def enter_context(device: int) -> None:
    """Make the device's primary context, which torch uses, this thread's where it has none."""
    _call("cuInit", 0)
    context = c_void_p()
    _call("cuCtxGetCurrent", byref(context))
    if not context.value:
        handle = c_int()
        _call("cuDeviceGet", byref(handle), device)
        _call("cuDevicePrimaryCtxRetain", byref(context), handle)
        _call("cuCtxSetCurrent", context)


def load_library(cubin: bytes) -> c_void_p:
    """A cubin, for every device of this process; it stays loaded as long as the process."""
    library = c_void_p()
    _call("cuLibraryLoadData", byref(library), cubin, None, None, 0, None, None, 0)
    return library


def get_kernel(library: c_void_p, name: str) -> c_void_p:
    kernel = c_void_p()
    _call("cuLibraryGetKernel", byref(kernel), library, name.encode())
    return kernel


def prepare(kernel: c_void_p, attributes: dict[int, int], device: int) -> None:
    """Set CUfunction_attributes for a device and load the code there: a first launch in a capture could not."""
    handle = c_int()
    _call("cuDeviceGet", byref(handle), device)
    for attribute, value in attributes.items():
        _call("cuKernelSetAttribute", attribute, value, kernel, handle)
    _call("cuKernelGetFunction", byref(c_void_p()), kernel)


def encode(tensor_map: TensorMap, address: int, at: int) -> None:
    """Write the CUtensorMap of a tensor at ``address`` to the host's memory at ``at``, a multiple of 64."""
    rank = len(tensor_map.dims)
    _call(
        "cuTensorMapEncodeTiled", at, tensor_map.dtype, rank, address, (c_uint64 * rank)(*tensor_map.dims),
        (c_uint64 * max(1, rank - 1))(*tensor_map.strides), (c_uint32 * rank)(*tensor_map.box),
        (c_uint32 * rank)(*tensor_map.element_strides), tensor_map.interleave, tensor_map.swizzle,
        tensor_map.l2_promotion, tensor_map.fill,
    )


def launch(config: LaunchConfig, kernel: c_void_p, parameters: Any, device: int) -> None:
    """``parameters``: a ctypes array of pointers to each of the kernel's, in order."""
    code = _function("cuLaunchKernelEx")(byref(config), kernel, parameters, None)
    if code == INVALID_CONTEXT:  # a thread that has called nothing of CUDA yet
        enter_context(device)
        code = _function("cuLaunchKernelEx")(byref(config), kernel, parameters, None)
    if code:
        raise DriverError("cuLaunchKernelEx", code)


def config_of(
    grid: Sequence[int], block: Sequence[int], smem_bytes: int, attributes: Sequence[tuple[int, bytes]]
) -> LaunchConfig:
    """A launch's configuration but for its stream."""
    array = (LaunchAttribute * max(1, len(attributes)))()
    for place, (identity, value) in enumerate(attributes):
        array[place].id = identity
        ctypes.memmove(array[place].value, value, len(value))
    return LaunchConfig((c_uint * 3)(*grid), (c_uint * 3)(*block), smem_bytes, None, array, len(attributes))


def allocate(nbytes: int) -> int:
    """The address of memory on the current context's device, which other processes can open."""
    address = c_uint64()
    _call("cuMemAlloc_v2", byref(address), nbytes)
    return address.value


def free(address: int) -> None:
    _call("cuMemFree_v2", address)


def export_memory(address: int) -> bytes:
    """What :func:`open_memory` of another process of this machine takes."""
    handle = MemoryHandle()
    _call("cuIpcGetMemHandle", byref(handle), address)
    return bytes(handle.reserved)


def open_memory(handle: bytes) -> int:
    """The address here of another process's memory, which may be another device's."""
    address = c_uint64()
    given = MemoryHandle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", byref(address), given, LAZY_PEER_ACCESS)
    return address.value


def close_memory(address: int) -> None:
    _call("cuIpcCloseMemHandle", address)


def register_host(address: int, nbytes: int) -> int:
    """Make the host's pages at ``address`` the device's too; where they are for the device."""
    _call("cuMemHostRegister_v2", address, nbytes, PORTABLE_AND_MAPPED)
    found = c_uint64()
    _call("cuMemHostGetDevicePointer_v2", byref(found), address, 0)
    return found.value


def unregister_host(address: int) -> None:
    _call("cuMemHostUnregister", address)


def copy_memory(stream: int, into: int, source: int, nbytes: int) -> None:
    """Between devices by a copy engine, in the stream's order."""
    _call("cuMemcpyDtoDAsync_v2", into, source, nbytes, stream)


def write_value(stream: int, address: int, value: int) -> None:
    """Write 32 bits once all before it in the stream is done and visible to the whole machine."""
    _call("cuStreamWriteValue32_v2", stream, address, value, 0)


def wait_value(stream: int, address: int, value: int) -> None:
    """Hold the stream, and no multiprocessor, until the 32 bits at ``address`` are ``value`` or, cyclically, later."""
    _call("cuStreamWaitValue32_v2", stream, address, value, 0)
