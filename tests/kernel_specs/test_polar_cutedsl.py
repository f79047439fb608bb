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
    ("asked", "groups", "word"),
    [
        (problem(12, 256, 1024), 2, "exceeds 256"),
        (problem(64, 128, 512), 4, "2 parts"),
        (problem(64, 256, 256), 4, "without a column"),
    ],
)
def test_an_illegal_configuration_says_why(asked: Problem, groups: int, word: str) -> None:
    assert word in (KERNEL.illegality(asked, PolarConfig(groups), H200) or "")


@pytest.mark.parametrize(
    ("asked", "groups"),
    [
        (problem(1, 1, 1), [1]), (problem(64, 128, 256), [1, 2]), (problem(64, 129, 129), [1, 2]),
        (problem(64, 256, 256), [1, 2]), (problem(9, 250, 500), [2, 4]), (problem(12, 256, 1024), [4]),
        (problem(64, 77, 512), [2]),
    ],
)
def test_what_it_serves_fits_in_shared_memory(asked: Problem, groups: list[int]) -> None:
    space = KERNEL.legal_space(asked, H200)
    assert [config.column_groups for config in space] == groups
    assert KERNEL.untuned(asked, H200) == KERNEL.heuristic(asked, H200) == space[0]
    assert all(smem_bytes(asked, config) <= H200.smem_per_block_bytes for config in space)


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
    # Each product that waits for the one before it would show as one wait more.
    assert len(re.findall(r"wgmma\.wait_group", code)) == (4 if halves == 2 else 3)
    resources = cubin_resources(compiled.__cubin__)
    assert resources["spill_bytes"] <= 128  # a few values across a step, none in a product
    assert 0 < resources["registers"] <= 255


@pytest.fixture(scope="module")
def hopper() -> DeviceFingerprint:
    from dmuon_tune.backends.probe import fingerprint

    found = fingerprint("cuda")
    if found.arch != "sm_90":
        pytest.skip(f"the CuTe DSL kernels run on sm_90, this is {found.arch}")
    return found


def launch_of(asked: Problem, device: DeviceFingerprint, groups: int = 0):  # type: ignore[no-untyped-def]
    config = PolarConfig(groups) if groups else KERNEL.untuned(asked, device)
    return backends()["cutedsl"].compile(KERNEL.build(asked, config, device), asked, device).launch


def case_id(value: object) -> str:
    return value.label().replace(" ", "-") if isinstance(value, Problem) else str(value)


GPU_CASES = (
    (problem(64, 256, 256), 1),
    (problem(150, 129, 256, "float16", "col", "s3"), 1),
    (problem(3, 200, 250, "float32", "col", "s4"), 2),
    (problem(3, 131, 255, "float32", "row", "s1"), 1),
    (problem(150, 128, 128, "bfloat16", "col"), 1),
    (problem(1, 1, 1, "float32", epilogue="s2"), 1),
    (problem(12, 256, 1024), 4),
    (problem(40, 250, 516, "float16", "col"), 4),
    (problem(150, 77, 509, "float32"), 2),
)


@pytest.mark.gpu
@pytest.mark.parametrize(("asked", "groups"), GPU_CASES, ids=case_id)
def test_results_match_float64(asked: Problem, groups: int, hopper: DeviceFingerprint) -> None:
    launch, op = launch_of(asked, hopper, groups), ops()["polar_small"]
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
