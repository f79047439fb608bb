"""What a CuTe DSL program launches, as data: its own host code runs against a recorder in place of the CUDA runtime."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dmuon_tune.portable import NotPortableError
from dmuon_tune.spec import Argument

from .cubin import cubin_parameters
from .cuda_launches import CudaCall, Kernel, Launch, Parameter, Patch, places_of
from .driver import (
    CLUSTER_DIMENSION,
    COOPERATIVE,
    DEFAULT_DYNAMIC_SMEM_BYTES,
    MAX_DYNAMIC_SMEM,
    PROGRAMMATIC_SERIALIZATION,
    TENSOR_MAP_BYTES,
)

FUNCTION = "dmuon_tune_kernel"  # of the exported object
C_COMPILERS = ("gcc", "clang", "cc")
SMEM_PER_BLOCK_OPTIN = 97  # cudaDevAttrMaxSharedMemoryPerBlockOptin
ATTRIBUTE_BYTES = {CLUSTER_DIMENSION: 12, COOPERATIVE: 4, PROGRAMMATIC_SERIALIZATION: 4}  # the rest is not initialized
HALVES = ("float16", "bfloat16")  # matrices, which these kernels take to be aligned to 16 bytes; tables are not
TENSOR_MAP_WRITTEN = 64  # of a tensor map CuTe DSL 4.5 writes the first half; the rest is whatever its stack held
MOST_LAUNCHES, MOST_PARAMETER_BYTES = 4, 4096
# Types of TVM FFI's values (tvm/ffi/c_api.h, TVMFFITypeIndex) and of DLPack's elements (dlpack.h, DLDataTypeCode).
FLOAT, DL_TENSOR, CUDA_DEVICE = 3, 7, 2
DL_TYPES = {"float16": (2, 16), "bfloat16": (4, 16), "float32": (2, 32), "int64": (0, 64), "int32": (0, 32)}
# What the library of CuTe DSL's host code refers to and a launch never calls.
UNUSED = (
    "cudaDeviceSynchronize cudaEventCreate cudaEventDestroy cudaEventElapsedTime cudaEventRecord cudaFree "
    "cudaFreeAsync cudaFreeHost cudaGraphDestroy cudaGraphExecDestroy cudaGraphInstantiate cudaGraphLaunch "
    "cudaLaunchKernel cudaLibraryUnload cudaMalloc cudaMallocAsync cudaMallocHost cudaMallocManaged cudaMemcpy "
    "cudaMemcpyAsync cudaMemset cudaMemsetAsync cudaOccupancyMaxActiveBlocksPerMultiprocessor cudaProfilerStart "
    "cudaProfilerStop cudaStreamAddCallback cudaStreamBeginCapture cudaStreamCreate cudaStreamDestroy "
    "cudaStreamEndCapture cudaStreamSynchronize cudaStreamWaitEvent "
).split()
RECORDER = r"""
#include <stdio.h>
#include <string.h>
typedef struct { unsigned id, pad; unsigned char value[64]; } attribute;
typedef struct { unsigned grid[3], block[3]; size_t smem; void *stream; attribute *attributes; unsigned count; } config;
typedef struct {
    unsigned grid[3], block[3]; unsigned long long smem, stream, kernel; unsigned count; attribute attributes[8];
    unsigned char parameters[%(bytes)d];
} launch;
launch record_launches[%(launches)d];
int record_count, record_parameters, record_sizes[256], record_smem_limit;
int record_set[16][2], record_set_count;
char record_error[1024], record_name[1024];

int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaSetDevice(int device) { return device != 0; }
int cudaGetLastError(void) { return 0; }
int cudaDeviceGetAttribute(int *value, int which, int device) {
    *value = record_smem_limit;
    return which != %(optin)d;
}
int cudaLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    *library = (void *)1;
    return 0;
}
int cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
    if (record_name[0] && strcmp(record_name, name)) return 1;
    snprintf(record_name, sizeof record_name, "%%s", name);
    *kernel = (void *)1;
    return 0;
}
static int set(int which, int value) {
    for (int i = 0; i < record_set_count; i++)
        if (record_set[i][0] == which) { record_set[i][1] = value; return 0; }
    if (record_set_count == 16) return 1;
    record_set[record_set_count][0] = which;
    record_set[record_set_count++][1] = value;
    return 0;
}
int cudaKernelSetAttributeForDevice(void *kernel, int which, int value, int device) { return set(which, value); }
int cudaFuncSetAttribute(const void *kernel, int which, int value) { return set(which, value); }
static int kernel_attribute(int *value, int which, void *kernel, int device) { *value = 0; return 0; }
static int get_device(int *handle, int device) { *handle = device; return 0; }
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned v, unsigned long long f, int *found) {
    *function = !strcmp(name, "cuKernelGetAttribute") ? (void *)kernel_attribute
        : !strcmp(name, "cuDeviceGet") ? (void *)get_device : 0;
    if (found) *found = *function == 0;
    return *function == 0;
}
const char *cudaGetErrorName(int error) { return error ? "not recorded" : "cudaSuccess"; }
const char *cudaGetErrorString(int error) { return cudaGetErrorName(error); }
int cudaLaunchKernelExC(const config *given, const void *kernel, void **parameters) {
    if (record_count == %(launches)d || given->count > 8) return 1;
    launch *to = &record_launches[record_count++];
    memset(to, 0, sizeof *to);
    memcpy(to->grid, given->grid, sizeof to->grid);
    memcpy(to->block, given->block, sizeof to->block);
    to->smem = given->smem, to->stream = (size_t)given->stream, to->kernel = (size_t)kernel, to->count = given->count;
    memcpy(to->attributes, given->attributes, given->count * sizeof(attribute));
    for (int i = 0, at = 0; i < record_parameters; at += record_sizes[i++]) {
        if (at + record_sizes[i] > %(bytes)d) return 1;
        memcpy(to->parameters + at, parameters[i], record_sizes[i]);
    }
    return 0;
}
void *TVMFFIEnvGetStream(int type, int device) { return (void *)%(stream)d; }
void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *text) {
    snprintf(record_error, sizeof record_error, "%%s: %%s", kind, text);
}
void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int count) {
    size_t at = snprintf(record_error, sizeof record_error, "%%s: ", kind);
    for (int i = 0; i < count && at < sizeof record_error; i++)
        at += snprintf(record_error + at, sizeof record_error - at, "%%s", parts[i]);
}
"""
STREAM = 0x5EED


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_ubyte * 64)]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("smem", ctypes.c_ulonglong),
        ("stream", ctypes.c_ulonglong), ("kernel", ctypes.c_ulonglong), ("count", ctypes.c_uint),
        ("attributes", _Attribute * 8), ("parameters", ctypes.c_ubyte * MOST_PARAMETER_BYTES),
    ]


class _Value(ctypes.Structure):
    """TVMFFIAny: a float's or a pointer's bits."""

    _fields_ = [("type", ctypes.c_int32), ("pad", ctypes.c_int32), ("bits", ctypes.c_uint64)]


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


def record(
    exported: Path, host_library: Path, cubin: bytes, arguments: Sequence[Argument], smem_limit_bytes: int
) -> CudaCall:
    """What a call with these arguments launches, of an object file that CuTe DSL exported as ``FUNCTION``.

    The host code is linked with a recorder and called with three sets of addresses and scalars: two tell which bytes of
    the kernel's parameters come of which argument, the third proves it. Raises NotPortableError where that fails.
    """
    kernels = cubin_parameters(cubin)
    if len(kernels) != 1:
        raise NotPortableError(f"its code has {len(kernels)} kernels, one can be recorded")
    ((name, sizes),) = kernels.items()
    library = _linked(exported, host_library)
    (ctypes.c_int * 256).in_dll(library, "record_sizes")[: len(sizes)] = list(sizes)
    ctypes.c_int.in_dll(library, "record_parameters").value = len(sizes)
    ctypes.c_int.in_dll(library, "record_smem_limit").value = smem_limit_bytes
    calls = [_values(arguments, number) for number in range(3)]
    recorded = [_called(library, arguments, values) for values in calls]
    name_there = (ctypes.c_char * 1024).in_dll(library, "record_name").value.decode()
    if name_there != name:
        raise NotPortableError(f"it launches {name_there}, its code has {name}")
    first = recorded[0][0]
    attributes = _kernel_attributes(library, first.smem)
    kernel = Kernel(0, name, tuple(first.block), first.smem, attributes, _launch_attributes(first))
    matrices = {
        place for place, argument in enumerate(arguments) if argument.dtype in HALVES and not argument.separate
    }
    launches = []
    for place in range(len(recorded[0])):
        same = [each[place] for each in recorded]
        if any(tuple(each.block) != kernel.block or each.smem != kernel.smem_bytes for each in same):
            raise NotPortableError("its launches differ in more than their grids")
        launches.append(Launch(0, tuple(same[0].grid), _parameters(same, sizes, calls)))
    kernel = replace(kernel, aligned=places_of(launches[0].parameters, matrices))
    return CudaCall(len(arguments), (kernel,), tuple(launches))


def _linked(exported: Path, host_library: Path) -> Any:
    named = os.environ.get("CC")
    compiler = shutil.which(named) if named else next(filter(None, map(shutil.which, C_COMPILERS)), None)
    if compiler is None:
        raise NotPortableError("recording its launches needs a C compiler; install gcc, or set CC to one")
    source, library = exported.with_suffix(".c"), exported.with_suffix(".so")
    unused = "\n".join(f"int {name}(void) {{ return 1; }}" for name in UNUSED)
    text = RECORDER % {
        "bytes": MOST_PARAMETER_BYTES, "launches": MOST_LAUNCHES, "optin": SMEM_PER_BLOCK_OPTIN, "stream": STREAM,
    }
    source.write_text(text + unused)
    # -Bsymbolic: the recorder answers, not a CUDA runtime that this process has loaded
    flags = ["-shared", "-fPIC", "-O1", "-w", "-Wl,-Bsymbolic"]
    command = [compiler, *flags, "-o", *map(str, (library, source, exported, host_library))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPortableError(f"its host code does not link: {(done.stderr or done.stdout).strip()[-300:]}")
    return ctypes.CDLL(str(library))


def _values(arguments: Sequence[Argument], number: int) -> list[Any]:
    """Addresses (no two call's differences are the same) and scalars (exact in float32) of one call."""
    return [
        1.5 + place + 0.25 * number if argument.role == "scalar"
        else (place + 1 << 36) + (number << 20) * (place + 1)
        for place, argument in enumerate(arguments)
    ]


def _called(library: Any, arguments: Sequence[Argument], values: Sequence[Any]) -> list[_Launch]:
    """The launches of one call."""
    count = ctypes.c_int.in_dll(library, "record_count")
    count.value = 0
    passed, kept = (_Value * len(arguments))(), []
    for place, (argument, value) in enumerate(zip(arguments, values, strict=True)):
        if argument.role == "scalar":
            passed[place] = _Value(FLOAT, 0, struct.unpack("<Q", struct.pack("<d", value))[0])
        else:
            kept.append(_tensor(argument, value))
            passed[place] = _Value(DL_TENSOR, 0, ctypes.addressof(kept[-1]))
    function = getattr(library, f"__tvm_ffi_{FUNCTION}")
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p]
    if function(None, ctypes.addressof(passed), len(arguments), ctypes.addressof(_Value())):
        said = (ctypes.c_char * 1024).in_dll(library, "record_error").value.decode(errors="replace")
        raise NotPortableError(f"its host code failed where it was recorded: {said}")
    launches = (_Launch * MOST_LAUNCHES).in_dll(library, "record_launches")[: count.value]
    copies = [_Launch.from_buffer_copy(launch) for launch in launches]
    if not copies or any(launch.stream != STREAM or launch.kernel != 1 for launch in copies):
        raise NotPortableError("it launched nothing on the current stream")
    return copies


def _tensor(argument: Argument, address: int) -> _Tensor:
    shape, dtype = argument.shape, argument.dtype
    if argument.separate:  # the addresses of its matrices
        shape, dtype = shape[:1], "int64"
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    extents = (ctypes.c_int64 * len(shape))(*shape)
    code, bits = DL_TYPES[dtype]
    return _Tensor(
        address, CUDA_DEVICE, 0, len(shape), code, bits, 1, extents, (ctypes.c_int64 * len(shape))(*strides), 0
    )


def _kernel_attributes(library: Any, smem_bytes: int) -> tuple[tuple[int, int], ...]:
    count = ctypes.c_int.in_dll(library, "record_set_count").value
    pairs = ((ctypes.c_int * 2) * 16).in_dll(library, "record_set")[:count]
    found = {attribute: value for attribute, value in pairs if attribute != MAX_DYNAMIC_SMEM}  # set to what a block has
    if smem_bytes > DEFAULT_DYNAMIC_SMEM_BYTES:
        found[MAX_DYNAMIC_SMEM] = smem_bytes
    return tuple(sorted(found.items()))


def _launch_attributes(launch: _Launch) -> tuple[tuple[int, str], ...]:
    found = []
    for attribute in launch.attributes[: launch.count]:
        if attribute.id not in ATTRIBUTE_BYTES:
            raise NotPortableError(f"it launches with an attribute of number {attribute.id}, which is not known here")
        found.append((attribute.id, bytes(attribute.value)[: ATTRIBUTE_BYTES[attribute.id]].hex()))
    return tuple(found)


def _parameters(
    launches: Sequence[_Launch], sizes: Sequence[int], calls: Sequence[Sequence[Any]]
) -> tuple[Parameter, ...]:
    """A launch's parameters from what three calls passed."""
    found, start = [], 0
    for size in sizes:
        blobs = [bytes(launch.parameters)[start : start + size] for launch in launches]
        if size == TENSOR_MAP_BYTES:
            blobs = [blob[:TENSOR_MAP_WRITTEN] + bytes(size - TENSOR_MAP_WRITTEN) for blob in blobs]
        parameter = _parameter(blobs, calls)
        if _filled(parameter, calls[2]) != blobs[2]:
            raise NotPortableError(f"a {size}-byte parameter depends on more than addresses and scalars")
        found.append(parameter)
        start += size
    return tuple(found)


def _parameter(blobs: Sequence[bytes], calls: Sequence[Sequence[Any]]) -> Parameter:
    """One parameter; what stays the same in two calls is constant."""
    constant, patches = bytearray(blobs[0]), []
    at = 0
    while at < len(constant):
        word, half = slice(at, at + 8), slice(at, at + 4)
        patch = None
        if at % 8 == 0 and len(constant) - at >= 8 and blobs[0][word] != blobs[1][word]:
            patch = _address(at, [int.from_bytes(blob[word], "little") for blob in blobs[:2]], calls)
        if patch is not None:
            constant[word], at = bytes(8), at + 8
        else:
            if blobs[0][half] != blobs[1][half]:
                patch = _scalar(at, [blob[half] for blob in blobs[:2]], calls)
                constant[half] = bytes(len(constant[half]))
            at += 4
        if patch is not None:
            patches.append(patch)
    return Parameter(constant.hex(), tuple(patches))


def _address(at: int, words: Sequence[int], calls: Sequence[Sequence[Any]]) -> Patch | None:
    for index, (first, second) in enumerate(zip(calls[0], calls[1], strict=True)):
        if isinstance(first, int) and words[1] - words[0] == second - first:
            return Patch(at, "tensor", index, words[0] - first)
    return None


def _scalar(at: int, halves: Sequence[bytes], calls: Sequence[Sequence[Any]]) -> Patch:
    for index, (first, second) in enumerate(zip(calls[0], calls[1], strict=True)):
        if isinstance(first, float) and [struct.pack("<f", first), struct.pack("<f", second)] == list(halves):
            return Patch(at, "float32", index)
    raise NotPortableError(f"bytes {at} to {at + 4} of a parameter are neither an address nor a scalar")


def _filled(parameter: Parameter, values: Sequence[Any]) -> bytes:
    data = bytearray.fromhex(parameter.data)
    for patch in parameter.patches:
        value = values[patch.index]
        packed = struct.pack("<Q", value + patch.add) if patch.kind == "tensor" else struct.pack("<f", value)
        data[patch.at : patch.at + len(packed)] = packed
    return bytes(data)
