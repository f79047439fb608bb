"""The CuTe DSL kernels: refusals, legality and code for sm_90a on any machine; results on a Hopper GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import re
import subprocess
from pathlib import Path

import pytest
import torch

from dmuon_tune.backends import backends
from dmuon_tune.backends.cubin import cubin_resources
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernel, ops
from dmuon_tune.kernel_specs._cutedsl_space import SymmetricConfig, registers, rounds_of, smem_bytes, tile_count
from dmuon_tune.problem import Problem

cutlass = pytest.importorskip("cutlass")
cute = pytest.importorskip("cutlass.cute")

H200 = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 50 * 2**20, 140 * 2**30)
KERNELS = {op: kernel(f"{op}.cutedsl") for op in ("gram", "gemm_symmetric")}


def problem(op: str = "gram", batch: int = 1, m: int = 1024, k: int | None = None, **fields: str) -> Problem:
    dtype = fields.pop("dtype", "float16")
    return Problem(op, batch, m, m, k or m, dtype=dtype, out_dtype=fields.pop("out_dtype", dtype), **fields)


def on(arch: str) -> DeviceFingerprint:
    return dataclasses.replace(H200, arch=arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "cpu-x86_64-avx2"])
def test_other_devices_are_refused_by_name(arch: str) -> None:
    for spec in KERNELS.values():
        assert arch in (spec.refusal(problem(spec.op), on(arch)) or "")
    assert arch in (backends()["cutedsl"].unavailable(on(arch)) or "")
    assert backends()["cutedsl"].unavailable(H200) is None


@pytest.mark.parametrize(
    ("refused", "word"),
    [
        (problem(m=1024, k=1020), "k must be a multiple of 8, not 1020"),
        (problem(m=1020, k=2048, layout="col"), "m must be a multiple of 8, not 1020"),
        (problem(dtype="float32"), "float32"),
        (problem(out_dtype="float32"), "float32"),
        (problem(epilogue="i"), "epilogue"),
        (Problem("gram", 1, 64, 128, 64), "n = m"),
        (problem(m=65536, k=65536), "elements"),
        (Problem("gemm_symmetric", 1, 100, 100, 64, epilogue="c"), "beside a c"),
    ],
)
def test_a_refusal_says_why(refused: Problem, word: str) -> None:
    assert word in (KERNELS[refused.op].refusal(refused, H200) or "")


def test_ragged_extents_off_the_contiguous_axis_are_served() -> None:
    assert KERNELS["gram"].refusal(problem(m=1001, k=1024), H200) is None
    assert KERNELS["gram"].refusal(problem(m=1024, k=1001, layout="col"), H200) is None


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (SymmetricConfig(tile_m=64, warpgroups=2), "warpgroups"),
        (SymmetricConfig(tile_m=256, tile_n=256), "accumulators"),
        (SymmetricConfig(tile_m=128, tile_n=256, stages=6), "shared memory"),
        (SymmetricConfig(tile_m=64, tile_n=128, stages=5, warpgroups=1, blocks_per_sm=2), "multiprocessor"),
        (SymmetricConfig(tile_m=128, tile_n=256, stages=2, blocks_per_sm=2), "registers"),
        (SymmetricConfig(warpgroups=1, pingpong=True), "in pairs"),
        (SymmetricConfig(tile_m=128, tile_n=256, stages=3, pingpong=True), "accumulators"),
        (SymmetricConfig(cluster=2, split=2), "not both"),
        (SymmetricConfig(tile_m=256, tile_n=192, tile_k=64, stages=2, split=2), "partial sums"),
        (SymmetricConfig(tile_n=256, stages=3, split=3), "3 do not fill the device for the 2 rounds"),
        (SymmetricConfig(tile_n=192, split=2), "leave 99 for a last round"),
    ],
)
def test_an_illegal_configuration_says_why(config: SymmetricConfig, word: str) -> None:
    assert word in (KERNELS["gram"].illegality(problem(m=4096), config, H200) or "")


def test_the_legal_space_is_searchable_and_has_the_untuned_choice() -> None:
    for m, batch in itertools.product((64, 256, 1000, 2048, 8192), (1, 8)):
        asked = problem(m=m, batch=batch)
        space = KERNELS["gram"].legal_space(asked, H200)
        assert KERNELS["gram"].untuned(asked, H200) == KERNELS["gram"].heuristic(asked, H200)
        assert KERNELS["gram"].untuned(asked, H200) in space
        assert all(smem_bytes(config) <= H200.smem_per_block_bytes for config in space)
    assert len(KERNELS["gram"].legal_space(problem(m=4096), H200)) > 50


@pytest.mark.parametrize("m", [6144, 8192, 12288])
@pytest.mark.parametrize("op", ["gram", "gemm_symmetric"])
def test_a_small_budget_tries_multicast_on_large_matrices(op: str, m: int) -> None:
    asked = problem(op, m=m, k=m, epilogue="c" if op == "gemm_symmetric" else "none")
    assert any(config.cluster > 1 for config in KERNELS[op].seeds(asked, H200)[:4])


def test_few_tiles_take_no_turns_and_a_low_matrix_shares_no_columns() -> None:
    illegality = KERNELS["gram"].illegality
    assert "take turns" in (illegality(problem(m=1024), SymmetricConfig(group=4, pingpong=True), H200) or "")
    assert "one tile high" in (illegality(problem(m=128, k=512), SymmetricConfig(group=1, cluster=2), H200) or "")
    few = SymmetricConfig(group=4, stages=2, split=2)
    assert "too few tiles" in (illegality(problem(m=512, k=192), few, H200) or "")


@pytest.mark.parametrize(
    ("tiles", "config", "expected"),
    [
        (576, SymmetricConfig(), (5, 0, 132)),
        (36, SymmetricConfig(), (1, 0, 36)),
        (576, SymmetricConfig(cluster=2), (9, 0, 66)),
        (576, SymmetricConfig(split=2), (4, 48, 66)),
        (66, SymmetricConfig(split=2), (0, 66, 66)),
        (36, SymmetricConfig(split=3), (0, 36, 36)),
        (132, SymmetricConfig(split=2), (1, 0, 66)),
    ],
)
def test_rounds_of_a_walk(tiles: int, config: SymmetricConfig, expected: tuple[int, int, int]) -> None:
    assert rounds_of(tiles, 132, config) == expected


@pytest.mark.parametrize(
    ("m", "tile_m", "tile_n", "group"),
    [(1000, 64, 192, 4), (200, 128, 256, 8), (4096, 128, 192, 8), (64, 128, 128, 1), (1384, 256, 64, 4)],
)
def test_every_tile_of_the_lower_triangle_is_walked_once(m: int, tile_m: int, tile_n: int, group: int) -> None:
    """The scheduler's own code, run on the CPU."""
    from cutlass.cute.runtime import from_dlpack

    from dmuon_tune.kernel_specs._cutedsl_symmetric import SymmetricProduct

    class Walk(SymmetricProduct):
        @cute.jit
        def walk(self, out: cute.Tensor):
            for index in range(cute.size(out, mode=[0])):
                batch, row, col = self._tile_of(cutlass.Int32(index))
                out[index, 0] = batch
                out[index, 1] = row
                out[index, 2] = col

    body = Walk(problem(m=m, batch=3, k=64), SymmetricConfig(tile_m, tile_n, 64, 2, 1, group), blocks=132)
    out = torch.zeros(3 * body.tiles, 3, dtype=torch.int32)
    body.walk(from_dlpack(out))
    rows, cols = range(-(-m // tile_m)), range(-(-m // tile_n))
    touching = [(row, col) for row in rows for col in cols if col * tile_n <= min(m, (row + 1) * tile_m) - 1]
    assert body.tiles == tile_count(m, tile_m, tile_n) == len(touching)
    assert sorted(map(tuple, out.tolist())) == sorted((b, *tile) for b in range(3) for tile in touching)


@pytest.mark.parametrize(
    ("asked", "config"),
    [
        (problem(m=1024, k=4096), SymmetricConfig(128, 128, 64, 4)),
        (
            problem("gemm_symmetric", batch=3, m=200, layout="col", dtype="bfloat16", epilogue="ci"),
            SymmetricConfig(64, 128, 64, 4, 1, 1, 2),
        ),
        (
            problem("gemm_symmetric", batch=16, m=1024, epilogue="c"),
            SymmetricConfig(128, 128, 64, 4, 2, 4, pingpong=True, cluster=2, buffers=2),
        ),
        (problem("gemm_symmetric", m=2048, epilogue="c"), SymmetricConfig(192, 192, 64, 3, 3, 4, split=2)),
    ],
    ids=["gram-row", "product-col-ci", "turns-cluster", "split"],
)
@pytest.mark.filterwarnings("error::UserWarning")
def test_it_compiles_to_tma_and_wgmma(asked: Problem, config: SymmetricConfig, tmp_path: Path) -> None:
    spec = KERNELS[asked.op]
    assert spec.illegality(asked, config, H200) is None
    program = spec.build(asked, config, H200)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch sm_90a --keep-ptx --keep-cubin --dump-dir {tmp_path}"
    compiled = cute.compile(program.entry, *program.arguments(), stream, options=options)
    code = compiled.__ptx__
    short = {"float16": "f16", "bfloat16": "bf16"}[asked.dtype]
    assert ".target sm_90a" in code
    assert f"wgmma.mma_async.sync.aligned.m64n{config.tile_n}k16.f32.{short}.{short}" in code
    expected = ["tile.bulk_group", "cp.async.bulk.tensor", "mbarrier.try_wait", "stmatrix", "griddepcontrol.wait"]
    expected += ["multicast::cluster"] * (config.cluster > 1) + ["ld.shared::cluster.v4.f32"] * (config.split > 1)
    for instruction in expected:
        assert instruction in code, instruction
    resources = cubin_resources(compiled.__cubin__)
    assert resources["spill_bytes"] == 0
    assert 0 < resources["registers"] <= registers(config)
    if (listing := disassembly(compiled.__cubin__, tmp_path)) is not None:
        # ptxas may serialize wgmma, with a wait after each; ours waits once for all of a tile's.
        assert len(re.findall(r"WARPGROUP.DEPBAR.LE gsb0, 0x0 ", listing)) <= 2 < listing.count("HGMMA")


def disassembly(cubin: bytes, folder: Path) -> str | None:
    """SASS by the disassembler that Triton's wheel carries, or None without one."""
    triton = importlib.util.find_spec("triton")
    program = Path(triton.origin or "").parent / "backends" / "nvidia" / "bin" / "nvdisasm" if triton else None
    if program is None or not program.exists():
        return None
    file = folder / "code.cubin"
    file.write_bytes(cubin)
    return subprocess.run([program, "-c", file], capture_output=True, text=True, check=True).stdout


@pytest.mark.filterwarnings("error::UserWarning")
def test_the_backend_reports_resources_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked, config = problem(m=72), SymmetricConfig(64, 64, 64, 2, 1, 1)
    compiled = backends()["cutedsl"].compile(KERNELS["gram"].build(asked, config, H200), asked, H200)
    assert compiled.resources["smem_bytes"] == smem_bytes(config)
    assert compiled.resources["registers"] > 0
    assert list(tmp_path.iterdir()) == []


def test_the_toolchain_names_what_generates_code() -> None:
    assert set(dict(backends()["cutedsl"].toolchain(H200).versions)) == {"apache-tvm-ffi", "nvidia-cutlass-dsl"}


CONFIGS = (
    SymmetricConfig(128, 128, 64, 4, 2, 8),
    SymmetricConfig(64, 64, 64, 5, 1, 1, 2),
    SymmetricConfig(128, 256, 64, 3, 2, 4),
    SymmetricConfig(128, 192, 64, 4, 2, 8),
    SymmetricConfig(64, 128, 128, 2, 1, 4),
    SymmetricConfig(256, 128, 64, 3, 2, 1),
    SymmetricConfig(64, 256, 64, 3, 1, 1),
    SymmetricConfig(128, 128, 128, 3, 1, 1),
)


def gpu_cases() -> list[tuple[Problem, SymmetricConfig]]:
    """Every value of every axis beside several of the others, not their whole product: each case is a compile."""
    extents = ((1, 64, 8), (3, 72, 5464), (1, 128, 1000), (3, 136, 136), (1, 200, 3000), (3, 256, 72), (1, 1000, 1384))
    epilogues = ("none", "c", "i", "ci")
    cases = []
    for turn, ((batch, m, k), layout) in enumerate(itertools.product(extents, ("row", "col"))):
        for dtype, config in (("float16", CONFIGS[turn % 8]), ("bfloat16", CONFIGS[(turn + 3) % 8])):
            cases.append((problem("gram", batch, m, k, layout=layout, dtype=dtype), config))
        fields = {"layout": layout, "dtype": ("float16", "bfloat16")[turn // 2 % 2]}
        for step in range(2):
            epilogue = epilogues[(turn + 2 * step + turn // 4) % 4]
            asked = problem("gemm_symmetric", batch, m, epilogue=epilogue, **fields)
            cases.append((asked, CONFIGS[(turn + 5 * step + 1) % 8]))
    # Ragged m where rows allow it (narrow stores), long walks of the ring, several tiles a block, a mixed output dtype.
    cases.append((problem("gram", 2, 333, 64), CONFIGS[0]))
    cases.append((problem("gram", 3, 1, 8), CONFIGS[1]))
    cases.append((problem("gram", 8, 2050, 512), CONFIGS[2]))
    cases.append((problem("gram", 1, 72, 77, layout="col"), CONFIGS[3]))
    cases.append((problem("gram", 5, 1544, 264, out_dtype="bfloat16"), CONFIGS[1]))
    cases.append((problem("gemm_symmetric", 2, 2048, epilogue="ci"), CONFIGS[2]))
    return cases + schedule_cases()


def schedule_cases() -> list[tuple[Problem, SymmetricConfig]]:
    """Turns, clusters and shared k: with rounds of several tiles a block, ragged ends and idle blocks."""
    turns = SymmetricConfig(128, 128, 64, 4, 2, 4, pingpong=True)
    changed = dataclasses.replace
    return [
        (problem("gemm_symmetric", 9, 1032, epilogue="ci"), changed(turns, stages=5)),
        (problem("gram", 9, 1800, 72, layout="col", dtype="bfloat16"), changed(turns, tile_m=64, tile_n=256, stages=2)),
        (problem("gemm_symmetric", 9, 1032, epilogue="c"), changed(turns, cluster=2, buffers=2)),
        (problem("gemm_symmetric", 16, 1032, epilogue="c", layout="col"), changed(turns, split=2)),
        (problem("gram", 3, 1000, 264, layout="col"), SymmetricConfig(128, 256, 64, 3, 2, 4, cluster=2)),
        (problem("gram", 7, 1000, 264, layout="col"), SymmetricConfig(128, 256, 64, 3, 2, 4, split=2)),
        (problem("gemm_symmetric", 1, 1032, epilogue="ci"), SymmetricConfig(192, 192, 64, 3, 3, 1, split=2)),
        (problem("gram", 3, 264, 5464, layout="col"), SymmetricConfig(64, 128, 64, 4, 1, 1, split=3)),
        (problem("gemm_symmetric", 1, 1000, epilogue="c"), SymmetricConfig(128, 256, 64, 3, 2, 4, split=4)),
    ]


def case_id(value: object) -> str:
    if isinstance(value, Problem):
        return value.label().replace(" ", "-")
    return "-".join(map(str, dataclasses.astuple(value)))  # type: ignore[call-overload]


@pytest.mark.gpu
@pytest.mark.parametrize(("asked", "config"), gpu_cases(), ids=case_id)
def test_results_match_float64(asked: Problem, config: SymmetricConfig, hopper: DeviceFingerprint) -> None:
    spec, op = KERNELS[asked.op], ops()[asked.op]
    launch = backends()["cutedsl"].compile(spec.build(asked, config, hopper), asked, hopper).launch
    inputs = op.make_inputs(asked, "cuda", 1)
    scalars = (0.75, -1.25, 0.5)[: sum(argument.role == "scalar" for argument in op.arguments(asked))]
    square = (asked.batch, asked.m, asked.m)
    out = torch.full(square, float("nan"), dtype=getattr(torch, asked.out_dtype), device="cuda")
    launch(*inputs, out, *scalars)
    expected = op.reference(asked, *inputs, *scalars)
    error = (out.double() - expected).abs() / (expected.abs() + expected.square().mean().sqrt())
    assert error.max().item() < 4 * torch.finfo(out.dtype).eps
    assert torch.equal(out, out.mT)
    first = out.clone()
    for _ in range(20):
        out.fill_(float("nan"))
        launch(*inputs, out, *scalars)
        assert torch.equal(out, first)


@pytest.mark.gpu
def test_a_launch_is_captured_on_the_current_stream(hopper: DeviceFingerprint) -> None:
    asked, op = problem(m=256, k=512), ops()["gram"]
    config = KERNELS["gram"].untuned(asked, hopper)
    launch = backends()["cutedsl"].compile(KERNELS["gram"].build(asked, config, hopper), asked, hopper).launch
    (x,) = op.make_inputs(asked, "cuda", 1)
    out = torch.empty(1, 256, 256, dtype=torch.float16, device="cuda")
    launch(x, out, 1.0)
    once = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # each waits for the one before it
            launch(x, out, 1.0)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, once)
