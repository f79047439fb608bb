"""The CuTe DSL kernel of whole recurrences: refusals and code for sm_90a on any machine; results on a Hopper GPU."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch

from dmuon_tune.backends import backends
from dmuon_tune.backends.cubin import cubin_resources
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernel, ops
from dmuon_tune.kernel_specs._cutedsl_polar_space import PolarConfig, smem_bytes
from dmuon_tune.measure.verify import verify
from dmuon_tune.problem import Problem

cutlass = pytest.importorskip("cutlass")
cute = pytest.importorskip("cutlass.cute")

H200 = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 50 * 2**20, 140 * 2**30)
KERNEL = kernel("polar_small.cutedsl")


def problem(
    batch: int, m: int, n: int, dtype: str = "bfloat16", layout: str = "row", epilogue: str = "s5r2"
) -> Problem:
    return Problem("polar_small", batch, m, n, m, dtype, dtype, layout, epilogue)


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "cpu-x86_64-avx2"])
def test_other_devices_are_refused_by_name(arch: str) -> None:
    assert arch in (KERNEL.refusal(problem(1, 256, 256), dataclasses.replace(H200, arch=arch)) or "")


@pytest.mark.parametrize(
    ("refused", "word"),
    [
        (problem(1, 256, 1025), "shared memory"),
        (problem(1, 100, 513), "shared memory"),
        (problem(1, 257, 257), "shared memory"),
        (problem(1, 200, 100), "short side"),
        (problem(1, 64, 64, epilogue="c"), "steps"),
        (dataclasses.replace(problem(1, 64, 64), k=32), "short side"),
    ],
)
def test_a_refusal_says_why(refused: Problem, word: str) -> None:
    assert word in (KERNEL.refusal(refused, H200) or "")


@pytest.mark.parametrize(
    ("asked", "config", "word"),
    [
        (problem(12, 256, 1024), PolarConfig(2), "exceeds 256"),
        (problem(64, 128, 512), PolarConfig(4), "2 parts"),
        (problem(64, 256, 256), PolarConfig(4), "without a column"),
        (problem(500, 128, 256), PolarConfig(1, 2), "registers"),
        (problem(132, 128, 128), PolarConfig(1, 2), "twice"),
    ],
)
def test_an_illegal_configuration_says_why(asked: Problem, config: PolarConfig, word: str) -> None:
    assert word in (KERNEL.illegality(asked, config, H200) or "")


@pytest.mark.parametrize(
    ("asked", "configs"),
    [
        (problem(1, 1, 1), [(1, 1)]), (problem(133, 9, 128), [(1, 1), (1, 2)]),
        (problem(64, 128, 256), [(1, 1), (2, 1)]),
        (problem(70, 77, 256), [(1, 1), (2, 1), (2, 2)]), (problem(64, 129, 129), [(1, 1), (2, 1)]),
        (problem(64, 256, 256), [(1, 1), (2, 1)]), (problem(9, 250, 500), [(2, 1), (4, 1)]),
        (problem(12, 256, 1024), [(4, 1)]), (problem(64, 77, 512), [(2, 1)]), (problem(2, 200, 516), [(4, 1)]),
    ],
)
def test_the_space_of_a_problem_fits_in_shared_memory(asked: Problem, configs: list[tuple[int, int]]) -> None:
    space = KERNEL.legal_space(asked, H200)
    assert [(config.column_groups, config.blocks_per_sm) for config in space] == configs
    assert KERNEL.untuned(asked, H200) == KERNEL.heuristic(asked, H200)
    assert KERNEL.heuristic(asked, H200) in space
    for config in space:
        assert config.blocks_per_sm * (smem_bytes(asked, config) + 1024) <= H200.smem_per_block_bytes + 1024


def test_whatever_is_not_refused_has_a_configuration() -> None:
    for m in (1, 64, 128, 129, 200, 256):
        for n in range(m, 1030, 3):
            for batch in (1, 200):
                asked = problem(batch, m, n)
                if KERNEL.refusal(asked, H200) is None:
                    assert KERNEL.is_legal(asked, KERNEL.heuristic(asked, H200), H200)


@pytest.mark.parametrize(
    ("asked", "products"),
    [
        (problem(64, 256, 256), 6 * 16),
        (problem(9, 100, 127, "float32", "col"), 3 * 8),
        (problem(64, 128, 512), 2 * 8 + 3 * 8),
    ],
    ids=["two-halves", "one-block", "column-groups"],
)
@pytest.mark.filterwarnings("error::UserWarning")
def test_it_compiles_to_wgmma_with_operands_in_registers(asked: Problem, products: int, tmp_path: Path) -> None:
    config = KERNEL.untuned(asked, H200)
    program = KERNEL.build(asked, config, H200)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch sm_90a --keep-ptx --keep-cubin --dump-dir {tmp_path}"
    compiled = cute.compile(program.entry, *program.arguments(), stream, options=options)
    code = compiled.__ptx__
    assert len(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n128k16\.f32\.f16\.f16", code)) == products
    for instruction in ("stmatrix.sync", "ldmatrix.sync", "fence.proxy.async"):
        assert instruction in code, instruction
    halves, groups = 1 + (asked.m > 128), config.column_groups
    for instruction in ("mapa.shared::cluster", "cp.async.bulk.shared::cluster.shared::cta", "mbarrier.try_wait"):
        assert (instruction in code) == (halves * groups > 1), instruction
    assert ("st.async" in code) == (groups > 1)
    resources = cubin_resources(compiled.__cubin__)
    assert resources["spill_bytes"] <= 128  # a few values across a step, none in a product
    assert 0 < resources["registers"] <= 255


def launch_of(asked: Problem, device: DeviceFingerprint, config: PolarConfig | None = None):  # type: ignore[no-untyped-def]
    config = config or KERNEL.untuned(asked, device)
    return backends()["cutedsl"].compile(KERNEL.build(asked, config, device), asked, device).launch


def case_id(value: object) -> str:
    if isinstance(value, Problem):
        return value.label().replace(" ", "-")
    return "-".join(map(str, dataclasses.astuple(value)))  # type: ignore[call-overload]


GPU_CASES = (
    (problem(64, 256, 256), PolarConfig()),
    (problem(150, 129, 256, "float16", "col", "s3"), PolarConfig()),
    (problem(3, 200, 250, "float32", "col", "s4"), PolarConfig(2)),
    (problem(3, 131, 255, "float32", "row", "s1"), PolarConfig()),
    (problem(300, 128, 128, "bfloat16", "col"), PolarConfig(1, 2)),
    (problem(1, 1, 1, "float32", epilogue="s2"), PolarConfig()),
    (problem(12, 256, 1024), PolarConfig(4)),
    (problem(40, 250, 516, "float16", "col"), PolarConfig(4)),
    (problem(150, 77, 509, "float32"), PolarConfig(2)),
)


@pytest.mark.gpu
@pytest.mark.parametrize(("asked", "config"), GPU_CASES, ids=case_id)
def test_results_match_float64(asked: Problem, config: PolarConfig, hopper: DeviceFingerprint) -> None:
    launch, op = launch_of(asked, hopper, config), ops()["polar_small"]
    verdict = verify(launch, op, asked, "cuda", seed=1)
    assert verdict.failure == ""
    u, coefficients = op.make_inputs(asked, "cuda", 2)
    first = torch.full_like(u, math.nan)
    launch(u, coefficients, first, 1.0)
    for _ in range(50):
        out = torch.full_like(u, math.nan)
        launch(u, coefficients, out, 1.0)
        assert torch.equal(out.view(torch.uint8), first.view(torch.uint8))


@pytest.mark.gpu
def test_any_scale_zero_and_values_that_are_not_finite(hopper: DeviceFingerprint) -> None:
    asked = problem(6, 256, 256)
    launch, op = launch_of(asked, hopper), ops()["polar_small"]
    u, coefficients = op.make_inputs(asked, "cuda", 3)
    expected = op.reference(asked, u, coefficients, 1.0)
    u = u * torch.tensor([1.0, 2.0**-100, 2.0**100, 1.0, 1.0, 0.0], dtype=u.dtype, device="cuda")[:, None, None]
    u[3, 10, 200], u[4, 200, 10] = math.inf, math.nan
    out = torch.empty_like(u)
    launch(u, coefficients, out, 1.0)
    assert (out[:3].double() - expected[:3]).abs().max() < 0.05 * expected.square().mean().sqrt()
    assert out[3:5].isnan().all()
    assert (out[5] == 0).all()
