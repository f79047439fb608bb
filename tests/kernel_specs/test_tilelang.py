"""The TileLang kernels: results on the CPU target, generated CUDA code on any machine, results on a GPU."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dmuon_tune.backends import backends
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernel, ops
from dmuon_tune.kernel_specs._tilelang import TileConfig, apply_shape, smem_bytes, symmetric_shape, triangle_tiles
from dmuon_tune.measure.build import compile_kernel
from dmuon_tune.problem import Problem

from .. import forked

pytest.importorskip("tilelang")

H200 = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 50 * 2**20, 140 * 2**30)
A100 = DeviceFingerprint("NVIDIA A100", "sm_80", 108, 166912, 40 * 2**20, 80 * 2**30)
B200 = DeviceFingerprint("NVIDIA B200", "sm_100", 148, 232448, 126 * 2**20, 180 * 2**30)
BACKEND = backends()["tilelang"]
KERNELS = {op: kernel(f"{op}.tilelang") for op in ("gram", "gemm_symmetric", "apply")}
SCALARS = (0.7, -1.3, 0.4)
TOLERANCES = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}  # a few units in the last place, of the largest entry
needs_cpp = pytest.mark.skipif(
    BACKEND.unavailable(fingerprint("cpu")) is not None, reason="TileLang's CPU target needs a C++ compiler"
)


def problem(
    op: str, batch: int, m: int, other: int, dtype: str, layout: str = "row", epilogue: str = "none"
) -> Problem:
    """``other`` is k of ``gram`` and n of ``apply``."""
    n, k = (other, m) if op == "apply" else (m, other)
    return Problem(op, batch, m, n, k, dtype, dtype, layout, epilogue)


def check(spec_problem: Problem, config: TileConfig, device: DeviceFingerprint) -> None:
    """Compile and run on this device: every element right, none left unwritten, the same twice, exactly symmetric."""
    spec, op = KERNELS[spec_problem.op], ops()[spec_problem.op]
    compiled = BACKEND.compile(spec.build(spec_problem, config, device), spec_problem, device)
    arguments = op.arguments(spec_problem)
    scalars = SCALARS[: sum(argument.role == "scalar" for argument in arguments)]
    (output,) = [argument for argument in arguments if argument.role == "output"]
    for seed in (0, 1):
        inputs = op.make_inputs(spec_problem, device.kind, seed)
        results = []
        for _ in range(2):
            result = torch.full(output.shape, float("nan"), dtype=getattr(torch, output.dtype), device=device.kind)
            compiled.launch(*inputs, result, *scalars)
            results.append(result)
        reference = op.reference(spec_problem, *inputs, *scalars)
        error = (results[0].double() - reference).abs().max() / reference.abs().max()
        assert error <= TOLERANCES[output.dtype], (spec_problem.label(), config)
        assert torch.equal(results[0], results[1]), (spec_problem.label(), config)
        if op.symmetric_output:
            assert torch.equal(results[0], results[0].mT), (spec_problem.label(), config)


@needs_cpp
@pytest.mark.parametrize(
    ("ran", "config"),
    [
        (problem("gram", 2, 67, 35, "float32"), TileConfig(64, 64, 32)),
        (problem("gram", 1, 130, 1, "float16", "col"), TileConfig(64, 128, 32)),
        (problem("gemm_symmetric", 2, 130, 130, "float16", "row", "ci"), TileConfig(128, 64, 64)),
        (problem("gemm_symmetric", 1, 65, 65, "float32", "col", "c"), TileConfig(64, 64, 64)),
        (problem("gemm_symmetric", 3, 1, 1, "float32", "row", "i"), TileConfig(64, 64, 32)),
        (problem("apply", 2, 33, 130, "float32", "row", "c"), TileConfig(64, 64, 32)),
        (problem("apply", 2, 70, 1, "float16", "col"), TileConfig(64, 64, 32)),
    ],
    ids=lambda value: value.label() if isinstance(value, Problem) else "",
)
def test_the_cpu_target_agrees_with_float64(ran: Problem, config: TileConfig) -> None:
    check(ran, config, fingerprint("cpu"))


@needs_cpp
def test_a_small_and_real_space_on_the_cpu() -> None:
    device = fingerprint("cpu")
    for ran in (problem("gram", 1, 256, 1024, "float32"), problem("apply", 4, 256, 1024, "float32", "col")):
        space = KERNELS[ran.op].legal_space(ran, device)
        assert len(space) == 12 and KERNELS[ran.op].untuned(ran, device) in space
    tiny = problem("gram", 1, 64, 32, "float32")
    assert KERNELS["gram"].legal_space(tiny, device) == [TileConfig(64, 64, 32)]


@pytest.mark.parametrize(
    ("refused", "device", "word"),
    [
        (problem("gram", 1, 64, 64, "bfloat16"), fingerprint("cpu"), "bfloat16"),
        (problem("gram", 1, 64, 64, "float32"), H200, "tf32"),
        (problem("gram", 1, 64, 64, "float16", "row", "c"), H200, "epilogue"),
        (problem("apply", 1, 64, 64, "float16", "row", "i"), H200, "epilogue"),
        (Problem("gram", 1, 64, 64, 64, "float16", "float32"), H200, "float32 asked"),
        (Problem("gram", 1, 64, 128, 64), H200, "n must equal m"),
        (problem("apply", 8, 16384, 16384, "float16"), H200, "2^31"),
        (problem("gram", 1, 64, 64, "float16"), DeviceFingerprint("V100", "sm_70", 80, 98304, 2**22, 2**34), "sm_70"),
    ],
)
def test_a_refusal_says_why(refused: Problem, device: DeviceFingerprint, word: str) -> None:
    assert word in (KERNELS[refused.op].refusal(refused, device) or "")


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (TileConfig(256, 256, 64, 5), "shared memory"),
        (TileConfig(256, 128, 64, 2, 128), "accumulators"),
        (TileConfig(128, 128, 64, 3, 192), "multiples"),
        (TileConfig(128, 104, 64), "multiples"),
        (TileConfig(128, 128, 24), "multiples"),
    ],
)
def test_illegal_configurations_say_why(config: TileConfig, word: str) -> None:
    assert word in (KERNELS["gram"].illegality(problem("gram", 1, 4096, 4096, "float16"), config, H200) or "")


def test_a_legal_space_holds_no_tile_larger_than_the_matrix_needs() -> None:
    for ran in (problem("gram", 64, 96, 200, "float16"), problem("apply", 1, 64, 2048, "float16")):
        shape = apply_shape(ran) if ran.op == "apply" else symmetric_shape(ran)
        for config in KERNELS[ran.op].legal_space(ran, H200):
            assert config.tile_m < 2 * max(shape.rows, 64) and config.tile_n < 2 * max(shape.cols, 64)
            assert smem_bytes(ran, config, shape) <= H200.smem_per_block_bytes


@pytest.mark.parametrize(
    ("m", "tile"),  # the winners of a sweep on one H200 with k = m, 2026-11-29
    [(1024, (64, 128)), (2048, (128, 192)), (4096, (128, 192)), (8192, (128, 256))],
)
def test_the_heuristic_picks_the_measured_tiles(m: int, tile: tuple[int, int]) -> None:
    config = KERNELS["gram"].untuned(problem("gram", 1, m, m, "float16"), H200)
    assert (config.tile_m, config.tile_n) == tile


def lower(lowered: Problem, config: TileConfig, device: DeviceFingerprint, arch: str) -> tuple[str, int]:
    """CUDA source and dynamic shared memory in bytes, without nvcc."""
    import tilelang
    from tilelang import tvm

    function, switches, smem = KERNELS[lowered.op].build(lowered, config, device)
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    with tvm.transform.PassContext(opt_level=3, config=switches), target:
        artifact = tilelang.lower(function, target=target)
    (device_function,) = artifact.device_mod.functions.values()
    assert int(device_function.attrs["dyn_shared_memory_buf"]) == smem
    return artifact.kernel_source, smem


def decoded_tiles(source: str, tiles: int, folder: Path) -> Iterator[tuple[int, int]]:
    """The tile each block works on: the generated arithmetic itself, compiled for the host and run."""
    lines = source.splitlines()
    start = next(at for at, line in enumerate(lines) if line.strip().startswith("g = "))
    stop = next(at for at, line in enumerate(lines) if at > start and line.strip().startswith("int row"))
    body = "\n".join(lines[start:stop]).replace("blockIdx.x", "block")
    (folder / "tile.cpp").write_text(
        "#include <math.h>\n#include <algorithm>\nusing std::min;\n"
        'extern "C" void decode(int block, int *tile) {\nint g, index, height, tile_i, tile_j;\n'
        f"{body}\ntile[0] = tile_i; tile[1] = tile_j;\n}}\n"
    )
    subprocess.run(["g++", "-shared", "-fPIC", "-o", folder / "tile.so", folder / "tile.cpp"], check=True)
    library = ctypes.CDLL(str(folder / "tile.so"))
    tile = (ctypes.c_int * 2)()
    for block in range(tiles):
        library.decode(block, tile)
        yield tile[0], tile[1]


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles generated arithmetic with g++")
@pytest.mark.parametrize(
    ("m", "config", "device", "arch", "instruction"),
    [
        (4096, TileConfig(128, 192, 64, 4), H200, "sm_90a", "wgmma_ss"),
        (2600, TileConfig(64, 256, 64, 3, 256, 8), H200, "sm_90a", "wgmma_ss"),
        (8192, TileConfig(64, 64, 32, 2, 128), A100, "sm_80", "mma_sync"),
        (2050, TileConfig(256, 192, 32, 2, 256, 8), B200, "sm_100a", "mma_sync"),
    ],
)
def test_cuda_blocks_cover_the_lower_triangle_once(
    m: int, config: TileConfig, device: DeviceFingerprint, arch: str, instruction: str, tmp_path: Path
) -> None:
    source, _ = lower(problem("gram", 1, m, 72, "float16"), config, device, arch)
    assert instruction in source
    expected = {
        (i, j)
        for i, j in itertools.product(range(-(-m // config.tile_m)), range(-(-m // config.tile_n)))
        if j * config.tile_n < min((i + 1) * config.tile_m, m)
    }
    tiles = triangle_tiles(m, config.tile_m, config.tile_n)
    assert tiles == len(expected)
    assert set(decoded_tiles(source, tiles, tmp_path)) == expected


def test_unaligned_rows_avoid_tma_and_wgmma() -> None:
    unaligned = problem("apply", 1, 65, 130, "bfloat16", "col", "c")
    source, _ = lower(unaligned, TileConfig(64, 64, 32, 2, 128), H200, "sm_90a")
    assert "tma_load" not in source and "wgmma" not in source.replace("wgmma.h", "") and "mma_sync" in source


@pytest.mark.skipif(BACKEND.unavailable(H200) is not None, reason="needs nvcc")
def test_cuda_compiles_without_a_gpu() -> None:
    compiled_problem = problem("gram", 1, 256, 256, "bfloat16", "col")
    config = TileConfig(64, 64, 64, 2, 128)
    compiled = BACKEND.compile(KERNELS["gram"].build(compiled_problem, config, H200), compiled_problem, H200)
    assert compiled.resources["smem_bytes"] == 2 * (64 + 64) * 64 * 2
    assert 32 <= compiled.resources["registers"] <= 255 and compiled.resources["spill_bytes"] == 0


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("CXX", "CC", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "g++" in (BACKEND.unavailable(fingerprint("cpu")) or "")
    assert "nvcc" in (BACKEND.unavailable(H200) or "")


def test_the_toolchain_names_its_compilers() -> None:
    for device, compiler in ((fingerprint("cpu"), "c++"), (H200, "nvcc")):
        versions = dict(BACKEND.toolchain(device).versions)
        assert set(versions) == {"apache-tvm-ffi", "tilelang", compiler} and all(versions.values())


def gpu_cases() -> Iterator[Any]:
    shapes = ((1, 1, 72), (2, 65, 130), (3, 130, 1), (2, 200, 5464), (1, 1024, 520), (1, 520, 520))
    for (batch, m, other), layout, dtype in itertools.product(shapes, ("row", "col"), ("float16", "bfloat16")):
        yield pytest.param(problem("gram", batch, m, other, dtype, layout))
        yield pytest.param(problem("apply", batch, m, other, dtype, layout, "c" if batch > 1 else "none"))
        for epilogue in ("none", "c", "i", "ci")[:: 1 if dtype == "float16" else 3]:
            yield pytest.param(problem("gemm_symmetric", batch, m, m, dtype, layout, epilogue))


@pytest.mark.gpu
@pytest.mark.parametrize("ran", list(gpu_cases()), ids=Problem.label)
def test_cuda_agrees_with_float64(ran: Problem) -> None:
    device = fingerprint("cuda")
    spec = KERNELS[ran.op]
    # One configuration beside the untuned one, another for each problem: a compilation takes up to 20 s.
    space = spec.legal_space(ran, device)
    for config in {spec.untuned(ran, device), space[zlib.crc32(ran.canonical_json().encode()) % len(space)]}:
        check(ran, config, device)


@pytest.mark.gpu
def test_a_launch_follows_the_current_stream_into_a_graph() -> None:
    device, ran = fingerprint("cuda"), problem("gram", 2, 256, 512, "float16")
    spec, op = KERNELS["gram"], ops()["gram"]
    launch = BACKEND.compile(spec.build(ran, spec.untuned(ran, device), device), ran, device).launch
    (x,) = op.make_inputs(ran, "cuda", 0)
    result = torch.full((2, 256, 256), float("nan"), dtype=torch.float16, device="cuda")
    launch(x, result, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(x, result, 1.0)
    result.fill_(float("nan"))
    x.mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(result.double(), op.reference(ran, x, 1.0), rtol=2e-3, atol=2e-3)


CACHED = """
import json, sys
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernel
from dmuon_tune.measure.build import compile_kernel
from dmuon_tune.problem import Problem
device = DeviceFingerprint.from_dict(json.loads(sys.argv[1]))
spec, problem = kernel("apply.tilelang"), Problem.from_dict(json.loads(sys.argv[2]))
found = compile_kernel(spec, problem, spec.untuned(problem, device), device)
assert callable(found.launch)
print(json.dumps(found.resources))
"""


@pytest.mark.skipif(BACKEND.unavailable(H200) is not None, reason="needs nvcc")
def test_a_kernel_from_the_disk_cache_is_as_good_as_a_fresh_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    asked, spec = Problem("apply", 1, 128, 128, 128), KERNELS["apply"]
    fresh = compile_kernel(spec, asked, spec.untuned(asked, H200), H200)
    kept = set(tmp_path.rglob("*"))
    cached = forked.run(
        "-c", CACHED, json.dumps(H200.to_dict()), json.dumps(asked.to_dict()),
        environ=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, folder=tmp_path.parent,
    )
    assert cached.returncode == 0, cached.stderr
    assert callable(fresh.launch) and set(tmp_path.rglob("*")) == kept != set()
    same = ("registers", "smem_bytes", "spill_bytes")
    assert [json.loads(cached.stdout)[name] for name in same] == [fresh.resources[name] for name in same]
