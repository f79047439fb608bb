"""What reaches the CUDA driver: a library in its place, compiled here, takes the calls and runs a kernel on a CPU."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dmuon_tune.backends import cuda_launches, driver
from dmuon_tune.backends.cuda_launches import CudaCall, Kernel, Launch, Parameter, Patch
from dmuon_tune.portable import UnloadableCodeError

# The declarations are those of cuda.h. The kernel computes y[i] = alpha * x[i] + added, of counts and flags that its
# parameters bring in other sizes, on host memory.
DRIVER = r"""
#include <stdint.h>
#include <string.h>
typedef struct { unsigned id; char pad[4]; char value[64]; } CUlaunchAttribute;
typedef struct {
    unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
    void *hStream; CUlaunchAttribute *attrs; unsigned numAttrs;
} CUlaunchConfig;
CUlaunchConfig seen; CUlaunchAttribute seen_attributes[4];
int current, attribute, attribute_value, contexts, encoded, lost_context; char loaded[64], name[64];
const char *launched;
int cuInit(unsigned flags) { return flags; }
int cuGetErrorName(int code, const char **text) { *text = code == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : 0; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 10 + ordinal; return 0; }
int cuCtxGetCurrent(void **context) { *context = current ? &current : 0; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { contexts++; *context = &current; return device != 10; }
int cuCtxSetCurrent(void *context) { current = context == &current; return 0; }
int cuLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    if (memcmp(code, "cubin", 5)) return 209;
    strcpy(loaded, code); *library = loaded; return a || b || c || d || e || f;
}
int cuLibraryGetKernel(void **kernel, void *library, const char *named) {
    strcpy(name, named); *kernel = name; return library != loaded;
}
int cuKernelGetFunction(void **function, void *kernel) { *function = kernel; return kernel != name; }
int cuKernelSetAttribute(int which, int value, void *kernel, int device) {
    attribute = which; attribute_value = value; return kernel != name || device != 10;
}
int cuTensorMapEncodeTiled(
    void *map, int type, uint32_t rank, void *address, const uint64_t *dims, const uint64_t *strides,
    const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill
) {
    uint64_t *to = map;
    if ((uintptr_t)map % 64) return 1;
    encoded++;
    to[0] = (uintptr_t)address; to[1] = type; to[2] = rank; to[3] = dims[rank - 1]; to[4] = strides[rank - 2];
    to[5] = box[0]; to[6] = steps[1]; to[7] = interleave * 1000 + swizzle * 100 + promotion * 10 + fill;
    return 0;
}
int cuLaunchKernelEx(const CUlaunchConfig *config, void *kernel, void **parameters, void **extra) {
    if (lost_context) { lost_context = 0; return 201; }
    seen = *config; launched = kernel;
    memcpy(seen_attributes, config->attrs, config->numAttrs * sizeof(CUlaunchAttribute));
    float *y = *(float **)parameters[0], alpha = *(float *)parameters[2]; uint64_t *map = parameters[1];
    const float *x = (float *)map[0];
    for (int i = 0; i < *(int64_t *)parameters[3]; i++) y[i] = alpha * x[i] + *(char *)parameters[4];
    return extra != 0;
}
"""
MAP = driver.TensorMap(7, (4, 6, 2), (16, 96), (4, 3, 1), (1, 2, 1), 0, 3, 2, 1)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    command = [compiler, "-shared", "-fPIC", "-w", "-o", folder / "libcuda.so", folder / "driver.c"]
    subprocess.run(command, check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "LIBRARY", str(folder / "libcuda.so"))
        driver._function.cache_clear()
        yield ctypes.CDLL(str(folder / "libcuda.so"))
    driver._function.cache_clear()


def number(library: ctypes.CDLL, name: str) -> int:
    return ctypes.c_int.in_dll(library, name).value


CALL = CudaCall(
    3,
    (Kernel(0, "scale", (64, 2, 1), 70000, ((8, 70000),), ((6, "01000000"), (4, struct.pack("<3i", 2, 1, 1).hex()))),),
    (
        Launch(0, (5, 6, 7), (
            Parameter(bytes(8).hex(), (Patch(0, "tensor", 1, 8),)),
            Parameter(tensor_map=MAP, tensor=0),
            Parameter(bytes(4).hex(), (Patch(0, "float32", 2),)),
            Parameter(struct.pack("<q", 3).hex()),
            Parameter("02"),
        )),
    ),
    images=(9,),
)


def test_a_launch_reaches_the_driver_as_it_was_recorded(library: ctypes.CDLL) -> None:
    driver.enter_context(0)
    assert number(library, "contexts") == 1
    kernel = driver.get_kernel(driver.load_library(b"cubin code\0"), "scale")
    driver.prepare(kernel, dict(CALL.kernels[0].attributes), 0)
    assert (number(library, "attribute"), number(library, "attribute_value")) == (8, 70000)
    launch = cuda_launches._PreparedLaunch(CudaCall.from_dict(as_json(CALL)).launches[0], CALL.kernels)

    x, y = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(5)
    launch.run([x.data_ptr(), y.data_ptr(), 1.5], [], [kernel], 4321, 0)
    assert y.tolist() == [0.0, 0.0, 3.5, 5.0, 6.5]  # 8 bytes further, by the constant of one byte
    seen = driver.LaunchConfig.in_dll(library, "seen")
    assert (list(seen.grid), list(seen.block), seen.smem_bytes, seen.stream) == ([5, 6, 7], [64, 2, 1], 70000, 4321)
    attributes = (driver.LaunchAttribute * 4).in_dll(library, "seen_attributes")[: seen.attribute_count]
    assert [(each.id, bytes(each.value)[:12]) for each in attributes] == [
        (6, struct.pack("<3i", 1, 0, 0)), (4, struct.pack("<3i", 2, 1, 1)),
    ]


def test_a_tensor_map_is_made_for_each_new_address_alone(library: ctypes.CDLL) -> None:
    launch = cuda_launches._PreparedLaunch(CALL.launches[0], CALL.kernels)
    kernel = driver.get_kernel(driver.load_library(b"cubin code\0"), "scale")
    tensors, y = [torch.full((3,), value) for value in (1.0, 2.0)], torch.zeros(5)
    made = []
    for place in (0, 0, 1, 0):
        before = number(library, "encoded")
        launch.run([tensors[place].data_ptr(), y.data_ptr(), 10.0], [], [kernel], 0, 0)
        made.append(number(library, "encoded") - before)
        assert y.tolist()[2:] == [10.0 * (place + 1) + 2] * 3
    assert made == [1, 0, 1, 1]
    memory = (ctypes.c_uint64 * 8).from_address(launch._pointers[1])
    assert list(memory)[1:] == [7, 3, 2, 96, 4, 2, 321]


def test_a_thread_without_a_context_gets_one(library: ctypes.CDLL) -> None:
    launch = cuda_launches._PreparedLaunch(CALL.launches[0], CALL.kernels)
    kernel = driver.get_kernel(driver.load_library(b"cubin code\0"), "scale")
    ctypes.c_int.in_dll(library, "lost_context").value = 1
    x, y = torch.ones(3), torch.zeros(5)
    launch.run([x.data_ptr(), y.data_ptr(), 1.0], [], [kernel], 0, 0)
    assert y.tolist()[2:] == [3.0] * 3


def test_unaligned_tensors_run_the_other_kernel(library: ctypes.CDLL) -> None:
    first = Kernel(0, "scale", (64, 1, 1), 0, aligned=(0,), otherwise=1)
    kernels = (first, Kernel(0, "scale", (32, 1, 1), 16))
    launch = cuda_launches._PreparedLaunch(CALL.launches[0], kernels)
    kernel = driver.get_kernel(driver.load_library(b"cubin code\0"), "scale")
    x, y = torch.ones(3), torch.zeros(9)
    blocks = []
    for offset in (0, 1):
        launch.run([x.data_ptr(), y[offset:].data_ptr(), 1.0], [], [kernel, kernel], 0, 0)
        blocks.append(list(driver.LaunchConfig.in_dll(library, "seen").block))
    assert blocks == [[64, 1, 1], [32, 1, 1]]


def test_unaligned_tensors_without_another_kernel_launch_nothing(library: ctypes.CDLL) -> None:
    launch = cuda_launches._PreparedLaunch(CALL.launches[0], (Kernel(0, "scale", (64, 1, 1), 0, aligned=(0, 1)),))
    kernel = driver.get_kernel(driver.load_library(b"cubin code\0"), "scale")
    x, y = torch.ones(9), torch.zeros(9)
    for first, second in ((x[1:], y), (x, y[1:])):
        with pytest.raises(ValueError, match="multiples of 16 bytes"):
            launch.run([first.data_ptr(), second.data_ptr(), 1.0], [], [kernel], 0, 0)
    assert not y.any()


def test_what_the_driver_refuses_is_said_by_its_name(library: ctypes.CDLL) -> None:
    with pytest.raises(driver.DriverError, match=r"cuLibraryLoadData failed: CUDA_ERROR_NO_BINARY_FOR_GPU \(209\)"):
        driver.load_library(b"other code\0")


def test_without_a_driver_or_with_broken_metadata_the_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libcuda-that-is-not-here.so")
    driver._function.cache_clear()
    try:
        with pytest.raises(UnloadableCodeError, match="driver is missing"):
            driver.load_library(b"cubin")
        for data, launch in ((b"not deflated", as_json(CALL)), (b"", {"kernels": []})):
            with pytest.raises(UnloadableCodeError):
                cuda_launches.FORMAT.load(data, launch, Path("none"))
    finally:
        driver._function.cache_clear()


def as_json(call: CudaCall) -> dict[str, object]:
    import json
    from dataclasses import asdict

    fields: dict[str, object] = json.loads(json.dumps(asdict(call)))
    return fields
