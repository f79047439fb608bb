"""``apply`` in CuTe DSL: refusals, legality, walk and code for sm_90a on any machine; results on a Hopper GPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dmuon_tune.backends import backends
from dmuon_tune.backends.cubin import cubin_resources
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernel, ops
from dmuon_tune.kernel_specs._cutedsl_apply_space import CONSUMER_REGISTERS, ApplyConfig, smem_bytes
from dmuon_tune.measure.build import compile_portable
from dmuon_tune.measure.verify import as_launched, in_launch_order, verify
from dmuon_tune.problem import Problem

cutlass = pytest.importorskip("cutlass")
cute = pytest.importorskip("cutlass.cute")

H200 = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 50 * 2**20, 140 * 2**30)
SPEC, OP = kernel("apply.cutedsl"), ops()["apply"]
COOPERATIVE, PINGPONG = "cooperative", "pingpong"


def problem(
    batch: int = 1, m: int = 1024, n: int = 4096, layout: str = "row", epilogue: str = "none", dtype: str = "float16",
    out_dtype: str | None = None,
) -> Problem:
    return Problem("apply", batch, m, n, m, dtype, out_dtype or dtype, layout, epilogue)


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "cpu-x86_64-avx2"])
def test_other_devices_are_refused_by_name(arch: str) -> None:
    assert arch in (SPEC.refusal(problem(), dataclasses.replace(H200, arch=arch)) or "")


@pytest.mark.parametrize(
    ("refused", "word"),
    [
        (problem(m=1020), "m must be a multiple of 8, not 1020"),
        (problem(n=1020), "n must be a multiple of 8, not 1020"),
        (problem(m=1020, layout="col"), "m must be a multiple of 8, not 1020"),
        (problem(dtype="float32"), "float32"),
        (problem(epilogue="i"), "'i'"),
        (Problem("apply", 1, 64, 64, 128), "k = m"),
        (problem(m=65536, n=65536), "elements"),
        (problem(m=32, layout="col", out_dtype="float32"), "pieces of 32 columns: there must be more than one, not 32"),
    ],
)
def test_a_refusal_says_why(refused: Problem, word: str) -> None:
    assert word in (SPEC.refusal(refused, H200) or "")


def test_ragged_extents_and_mixed_dtypes_are_served() -> None:
    assert SPEC.refusal(problem(m=8, n=777, layout="col"), H200) is None
    for out_dtype, epilogue in itertools.product(("float16", "bfloat16", "float32"), ("none", "c", "w")):
        assert SPEC.refusal(problem(out_dtype=out_dtype, epilogue=epilogue), H200) is None


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (ApplyConfig(tile_m=64), "rows at a time"),
        (ApplyConfig(tile_m=256, tile_n=256, stages=3), "accumulators"),
        (ApplyConfig(tile_m=256, tile_n=192), "shared memory"),
        (ApplyConfig(cluster_m=2, cluster_n=2), "two blocks"),
        (ApplyConfig(tile_m=64, schedule=PINGPONG, stages=3), "256 columns"),
        (ApplyConfig(group=16), "group of 16"),
    ],
)
def test_an_illegal_configuration_says_why(config: ApplyConfig, word: str) -> None:
    assert word in (SPEC.illegality(problem(epilogue="c"), config, H200) or "")


def test_what_a_cache_names_is_compiled_only_where_it_is_legal() -> None:
    with pytest.raises(ValueError, match="apply.cutedsl is not compiled for apply 1x64x4096x64.*64 rows are one piece"):
        compile_portable(SPEC, problem(m=64), ApplyConfig(128, 64, 3, group=1), H200)


def test_limits_depend_on_the_problem() -> None:
    assert "share" in (SPEC.illegality(problem(n=256), ApplyConfig(cluster_n=2), H200) or "")
    assert "share" in (SPEC.illegality(problem(m=128), ApplyConfig(cluster_m=2, group=1), H200) or "")
    assert "accumulators" in (SPEC.illegality(problem(epilogue="w"), ApplyConfig(256, 192, 3, group=1), H200) or "")
    assert SPEC.illegality(problem(), ApplyConfig(256, 192, 3, group=1), H200) is None
    assert "64 rows are one piece of 64" in (SPEC.illegality(problem(m=64), ApplyConfig(128, 64, 3), H200) or "")
    assert "40 columns are one" in (SPEC.illegality(problem(n=40), ApplyConfig(128, 128, 3), H200) or "")
    assert SPEC.illegality(problem(m=64, epilogue="w"), ApplyConfig(128, 64, 3, group=1), H200) is None
    assert "stages" in (SPEC.illegality(problem(m=128), ApplyConfig(group=1), H200) or "")


def test_the_legal_space_is_searchable_and_has_the_untuned_choice() -> None:
    for m, n, batch, layout in itertools.product((8, 64, 256, 1000, 4096), (64, 1000, 8192), (1, 8), ("row", "col")):
        asked = problem(batch, m, n, layout)
        space = SPEC.legal_space(asked, H200)
        assert SPEC.untuned(asked, H200) == SPEC.heuristic(asked, H200)
        assert SPEC.untuned(asked, H200) in space
        assert all(smem_bytes(config) <= H200.smem_per_block_bytes for config in space)
    assert len(SPEC.legal_space(problem(m=4096), H200)) > 100


@pytest.mark.parametrize(
    ("asked", "best"),
    [
        (problem(1, 4096, 4096), (128, 256, COOPERATIVE, 2)),
        (problem(1, 4096, 4096, epilogue="c"), (128, 256, COOPERATIVE, 2)),
        (problem(1, 4096, 4096, epilogue="w", out_dtype="float32"), (128, 128, PINGPONG, 2)),
        (problem(1, 3584, 18944), (128, 192, PINGPONG, 2)),
        (problem(1, 2048, 8192), (128, 256, COOPERATIVE, 2)),
        (problem(8, 2048, 5464), (128, 192, PINGPONG, 2)),
        (problem(16, 1024, 4096), (128, 192, PINGPONG, 2)),
        (problem(24, 768, 3072), (128, 192, PINGPONG, 2)),
        (problem(1, 1024, 4096), (128, 256, COOPERATIVE, 1)),
        (problem(1, 1024, 1024), (128, 64, COOPERATIVE, 1)),
    ],
    ids=lambda value: value.label() if isinstance(value, Problem) else "",
)
def test_the_untuned_choice_is_the_fastest_one_measured(asked: Problem, best: tuple[int, int, str, int]) -> None:
    """docs/apply.md has the timings."""
    config = SPEC.untuned(asked, H200)
    assert (config.tile_m, config.tile_n, config.schedule, config.cluster_m) == best


@pytest.mark.parametrize(
    ("rows", "cols", "config"),
    [
        (1000, 3000, ApplyConfig(128, 256, group=4)),
        (1000, 3000, ApplyConfig(64, 192, 4, PINGPONG, 2, 1, 8)),
        (2056, 520, ApplyConfig(256, 128, 4, COOPERATIVE, 1, 2, 4)),
        (8, 8, ApplyConfig(64, 64, 4, PINGPONG, group=1)),
    ],
)
def test_every_tile_is_walked_once(rows: int, cols: int, config: ApplyConfig) -> None:
    """The scheduler's own code, run on the CPU."""
    from cutlass.cute.runtime import from_dlpack

    from dmuon_tune.kernel_specs._cutedsl_apply import Apply

    class Walk(Apply):
        @cute.jit
        def walk(self, out: cute.Tensor):
            for index in range(cute.size(out, mode=[0])):
                for place in range(self.cluster_size):
                    batch, row, col = self._tile_of(cutlass.Int32(index), cutlass.Int32(place))
                    out[index, place, 0] = batch
                    out[index, place, 1] = row
                    out[index, place, 2] = col

    body = Walk(problem(3, rows, cols), config, blocks=132)
    out = torch.full((body.tiles, body.cluster_size, 3), -1, dtype=torch.int32)
    body.walk(from_dlpack(out))
    walked = list(map(tuple, out.reshape(-1, 3).tolist()))
    tiles = itertools.product(range(3), range(-(-rows // config.tile_m)), range(-(-cols // config.tile_n)))
    assert len(walked) == len(set(walked))
    assert set(tiles) <= set(walked)
    if body.cluster_size == 2:  # what a cluster shares: tile columns below each other, tile rows side by side
        shared = 2 if config.cluster_m == 2 else 1
        assert bool((out[:, 0, shared] == out[:, 1, shared]).all())


@pytest.mark.parametrize("out_dtype", ["float16", "float32"])
@pytest.mark.parametrize("layout", ["row", "col"])
def test_no_piece_of_a_tile_is_stored_over_another(layout: str, out_dtype: str) -> None:
    """The places that TMA is told, of all legal tiles: what lies beyond the matrix stays beyond it."""
    from dmuon_tune.kernel_specs._cutedsl_apply import Apply
    from dmuon_tune.kernel_specs._cutedsl_apply_space import STAGED_ROWS

    extents = (8, 32, 40, 64, 72, 128, 200)
    asked = [problem(2, m, n, layout, out_dtype=out_dtype) for m, n in itertools.product(extents, repeat=2)]
    served = [each for each in asked if SPEC.refusal(each, H200) is None]
    wrong = []

    def look() -> None:  # apart, since the DSL would make the loops its own
        for each in served:
            bodies = [Apply(each, config, blocks=132) for config in SPEC.legal_space(each, H200)]
            (rows, cols, across), = {(body.rows, body.cols, body.staged_cols) for body in bodies}
            pieces = cute.local_tile(cute.make_identity_tensor((rows, cols, 2)), (STAGED_ROWS, across), (None,) * 3)
            stored = {
                at for body in bodies for at in itertools.product(
                    range(0, body.tile_rows * body.cluster[0] * body.tile[0], STAGED_ROWS),
                    range(0, body.tile_cols * body.cluster[1] * body.tile[1], across),
                )
            }
            for row, col in stored:
                place = tuple(pieces[(0, 0, row // STAGED_ROWS, col // across, 1)])
                if place != (row, col, 1):
                    wrong.append((each.label(), row, col, place))

    @cute.jit
    def store():
        look()

    store()
    assert len(served) > 20 and all(SPEC.legal_space(each, H200) for each in served)
    assert not wrong


def test_staged_elements_lie_where_the_accumulators_say() -> None:
    """Rows that stmatrix and ldmatrix address, against wgmma's accumulator layout: Apply's own copies, on the CPU."""
    from cutlass.cute.nvgpu import warp
    from cutlass.cute.runtime import from_dlpack

    from dmuon_tune.kernel_specs._cutedsl_apply import Apply

    class Places(Apply):
        @cute.jit
        def fill(self, stored: cute.Tensor, loaded: cute.Tensor):
            store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
            load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype)
            coordinates = cute.make_identity_tensor((64, 64))
            for lane in range(128):
                to, _ = self._piece_copy(64, store, lane)
                of, _ = self._piece_copy(64, load, lane)
                for element in cutlass.range_constexpr(32):
                    for axis in cutlass.range_constexpr(2):
                        stored[lane, element, axis] = to.partition_D(coordinates)[element][axis]
                        loaded[lane, element, axis] = of.partition_S(coordinates)[element][axis]

    stored, loaded = torch.empty(2, 128, 32, 2, dtype=torch.int32)
    arguments = from_dlpack(stored), from_dlpack(loaded)
    fill = Places(problem(), ApplyConfig(), blocks=132).fill
    cute.compile(fill, *arguments, options="--gpu-arch sm_90a")(*arguments)
    assert torch.equal(stored, loaded)
    # PTX ISA, stmatrix .x4: lane 8i + r addresses row r of matrix i, lane t holds two columns of its row t // 4;
    # wgmma m64nNk16, D: lane t of warp w holds rows 16w + t // 4 (+ 8), columns 8j + 2(t % 4), +1.
    for warp_index, atom, matrix, t in itertools.product(range(4), range(4), range(4), range(32)):
        row, col = stored[32 * warp_index + 8 * matrix + t // 4, 8 * atom].tolist()
        expected = (16 * warp_index + t // 4 + 8 * (matrix % 2), 16 * atom + 8 * (matrix // 2))
        assert (row, col) == expected


@pytest.mark.parametrize(
    ("asked", "config", "instructions"),
    [
        (problem(), ApplyConfig(128, 256, 4, COOPERATIVE, 2, 1, 4), ("multicast::cluster", "stmatrix", "m64n256k16")),
        (
            problem(3, 200, 333, "col", "c", "bfloat16", "float32"),
            ApplyConfig(128, 128, 4, PINGPONG, 1, 2, 1),
            ("multicast::cluster", "ldmatrix", "m64n128k16.f32.bf16.bf16"),
        ),
        (problem(epilogue="w", out_dtype="float32"), ApplyConfig(), ("prefetch.global.L2", "m64n256k16")),
    ],
    ids=["cooperative", "pingpong-c", "update"],
)
@pytest.mark.filterwarnings("error::UserWarning")
def test_it_compiles_to_tma_and_wgmma(
    asked: Problem, config: ApplyConfig, instructions: tuple[str, ...], tmp_path: Path
) -> None:
    assert SPEC.illegality(asked, config, H200) is None
    program = SPEC.build(asked, config, H200)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch sm_90a --keep-ptx --keep-cubin --dump-dir {tmp_path}"
    compiled = cute.compile(program.entry, *program.arguments(), stream, options=options)
    for instruction in ("cp.async.bulk.tensor", "mbarrier.try_wait", "griddepcontrol.wait", *instructions):
        assert instruction in compiled.__ptx__, instruction
    resources = cubin_resources(compiled.__cubin__)
    assert resources["spill_bytes"] == 0
    assert 0 < resources["registers"] <= CONSUMER_REGISTERS


GPU_CASES = (
    (problem(2, 200, 328), ApplyConfig(128, 128, 3, COOPERATIVE, 1, 1, 1)),
    (problem(1, 8, 8), ApplyConfig(64, 64, 3, PINGPONG, 1, 1, 1)),
    (problem(1, 136, 333, "col", dtype="bfloat16"), ApplyConfig(128, 64, 3, COOPERATIVE, 1, 1, 1)),
    (problem(2, 648, 1160), ApplyConfig(128, 256, 4, COOPERATIVE, 2, 1, 1)),
    (problem(3, 520, 520, out_dtype="float32"), ApplyConfig(256, 192, 3, COOPERATIVE, 2, 1, 1)),
    (problem(2, 264, 1000, "row", "c"), ApplyConfig(128, 256, 4, COOPERATIVE, 1, 1, 1)),
    (problem(5, 392, 1048, "row", "c"), ApplyConfig(128, 128, 4, PINGPONG, 2, 1, 1)),
    (problem(4, 456, 777, "col", "c", "bfloat16", "float32"), ApplyConfig(64, 256, 4, PINGPONG, 1, 2, 1)),
    (problem(2, 2048, 2048, "col"), ApplyConfig(64, 192, 4, PINGPONG, 2, 1, 4)),
    (problem(2, 264, 520, "row", "w", out_dtype="float32"), ApplyConfig(128, 256, 4, COOPERATIVE, 1, 1, 1)),
    (problem(3, 264, 333, "col", "w", out_dtype="bfloat16"), ApplyConfig(128, 128, 4, PINGPONG, 1, 1, 1)),
    (problem(5, 1032, 2056, "row", "w", out_dtype="bfloat16"), ApplyConfig(256, 128, 4, COOPERATIVE, 1, 2, 4)),
)


def case_id(value: object) -> str:
    if isinstance(value, Problem):
        return f"{value.label()} {value.out_dtype}".replace(" ", "-")
    return "-".join(map(str, dataclasses.astuple(value)))  # type: ignore[call-overload]


@pytest.mark.gpu
@pytest.mark.parametrize(("asked", "config"), GPU_CASES, ids=case_id)
def test_results_match_float64(asked: Problem, config: ApplyConfig) -> None:
    from dmuon_tune.backends.probe import fingerprint

    hopper = fingerprint("cuda")
    if hopper.arch != "sm_90":
        pytest.skip(f"the CuTe DSL kernels run on sm_90, this is {hopper.arch}")
    assert SPEC.illegality(asked, config, hopper) is None
    launch = backends()["cutedsl"].compile(SPEC.build(asked, config, hopper), asked, hopper).launch
    assert verify(launch, OP, asked, "cuda", 1).failure == ""
    first = launched(launch, asked)
    assert all(torch.equal(launched(launch, asked), first) for _ in range(10))


def launched(launch: Callable[..., object], asked: Problem) -> torch.Tensor:
    """What a launch on the same inputs writes."""
    arguments = OP.arguments(asked)
    inputs = OP.make_inputs(asked, "cuda", 2)
    outputs = [
        torch.full(argument.shape, float("nan"), dtype=getattr(torch, argument.dtype), device="cuda")
        for argument in arguments
        if argument.role == "output"
    ]
    scalars = [0.75, -0.25][: sum(argument.role == "scalar" for argument in arguments)]
    launch(*as_launched(OP, asked, in_launch_order(OP, asked, inputs, outputs, scalars)))
    return outputs[0] if outputs else inputs[2]
