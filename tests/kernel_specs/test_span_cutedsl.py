"""The CuTe DSL kernel of whole spans: what it serves, its phases, code for sm_90a; results on a Hopper GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from dmuon_tune.backends import backends
from dmuon_tune.backends.cubin import cubin_resources
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernel, ops
from dmuon_tune.kernel_specs._cutedsl_space import registers
from dmuon_tune.kernel_specs._cutedsl_span_space import SpanConfig, flight, members
from dmuon_tune.problem import Problem

cutlass = pytest.importorskip("cutlass")
cute = pytest.importorskip("cutlass.cute")

H200 = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 50 * 2**20, 140 * 2**30)
SPAN = kernel("gram_span.cutedsl")


def problem(batch: int, m: int, steps: int = 3, dtype: str = "float16") -> Problem:
    return Problem("gram_span", batch, m, m, m, dtype, dtype, "row", f"s{steps}")


@pytest.mark.parametrize(
    ("refused", "word"),
    [
        (problem(1, 1020), "m must be a multiple of 8"),
        (problem(1, 2056), "more than 2048 rows"),
        (problem(1, 1024, dtype="float32"), "float32"),
        (dataclasses.replace(problem(1, 1024), epilogue="c"), "steps"),
        (dataclasses.replace(problem(1, 1024), k=512), "square"),
    ],
)
def test_a_refusal_says_why(refused: Problem, word: str) -> None:
    refusal = SPAN.refusal(refused, H200)
    assert refusal is not None and word in refusal


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (SpanConfig(rounds=5), "fewer than 5"),
        (SpanConfig(rounds=32), "fewer than 32"),
        (SpanConfig(128, 256), "accumulators"),
        (SpanConfig(stages=5), "multiprocessor"),
        (SpanConfig(64, 192, stages=2), "2 stages do not hold"),
        (SpanConfig(128, stages=3, cluster=2, rounds=2), None),
    ],
)
def test_an_illegal_configuration_says_why(config: SpanConfig, word: str | None) -> None:
    illegality = SPAN.illegality(problem(16, 1024), config, H200)
    assert illegality is None if word is None else word in (illegality or "")


def test_more_matrices_than_blocks_need_rounds() -> None:
    assert "more than the device's blocks" in (SPAN.illegality(problem(300, 72), SpanConfig(64, 64), H200) or "")
    assert SPAN.illegality(problem(300, 72), SpanConfig(64, 64, rounds=2), H200) is None


@pytest.mark.parametrize("batch", [1, 3, 16, 32, 300, 5000])
def test_the_untuned_choice_is_legal_and_its_groups_fit_the_device(batch: int) -> None:
    for m in (8, 136, 512, 1000, 2048):
        asked = problem(batch, m)
        config = SPAN.untuned(asked, H200)
        assert config is not None and SPAN.is_legal(asked, config, H200)
        blocks = flight(asked, config) * members(asked, config, H200.sm_count) * config.cluster
        assert 0 < blocks <= H200.sm_count * config.blocks_per_sm


@pytest.mark.parametrize("steps", [2, 3, 5])
def test_the_phases_compute_the_recurrence(steps: int) -> None:
    """The kernel's own table of phases, run on the CPU, drives products of small matrices in float64."""
    from cutlass.cute.runtime import from_dlpack

    from dmuon_tune.kernel_specs._cutedsl_span_phases import Q, R, SpanPhases

    class Listed(SpanPhases):
        @cute.jit
        def listing(self, out: cute.Tensor):
            for phase in range(cute.size(out, mode=[0])):
                for product in range(2):
                    a, b, d, is_q = self._squares(cutlass.Int32(phase), cutlass.Int32(product))
                    out[phase, product, 0] = a
                    out[phase, product, 1] = b
                    out[phase, product, 2] = d
                    out[phase, product, 3] = cutlass.Int32(is_q)
                    out[phase, product, 4] = self._products_of(cutlass.Int32(phase))

    asked = problem(1, 64, steps)
    body = Listed(asked, SpanConfig(64, 64), H200.sm_count)
    table = torch.zeros(body.phases, 2, 5, dtype=torch.int32)
    body.listing(from_dlpack(table))

    rng = torch.Generator().manual_seed(0)
    x = torch.randn(6, 6, dtype=torch.float64, generator=rng)
    r = x @ x.T / 20
    coefficients = torch.rand(steps, 3, dtype=torch.float64, generator=rng)
    work = torch.full((5, 6, 6), float("nan"), dtype=torch.float64)
    result, count = None, 0
    for phase, rows in enumerate(table.tolist()):
        (a0, b0, c0), written = coefficients[phase // 3].tolist(), {}
        alpha, beta = (c0, b0) if phase % 3 == 0 else (1.0, a0)
        for a, b, d, is_q, _ in rows[: rows[0][4]]:
            left = r if a == R and phase < 2 else work[a]
            right = r if b == R and phase < 2 else work[b]
            count, value = count + 1, alpha * left @ right + beta * left
            if is_q and phase == body.phases - 1:
                result = value
            else:
                written[d] = value
        if phase == 0:
            written[Q] = written[0] + a0 * torch.eye(6, dtype=torch.float64)
        for slot, value in written.items():
            work[slot] = value
    assert count == body.products
    q, power = torch.eye(6, dtype=torch.float64), r
    for a, b, c in coefficients.tolist():
        p = c * power @ power + b * power + a * torch.eye(6, dtype=torch.float64)
        q, power = q @ p, power @ p @ p
    assert result is not None
    torch.testing.assert_close(result, q)


@pytest.mark.filterwarnings("error::UserWarning")
def test_it_compiles_to_one_cooperative_kernel(tmp_path: Path) -> None:
    asked, config = problem(3, 200), SpanConfig(64, 64, 64, 5)
    assert SPAN.illegality(asked, config, H200) is None
    program = SPAN.build(asked, config, H200)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch sm_90a --keep-ptx --keep-cubin --dump-dir {tmp_path}"
    compiled = cute.compile(program.entry, *program.arguments(), stream, options=options)
    code = compiled.__ptx__
    for instruction in (
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16", "ld.acquire.gpu.global", "fence.proxy.async.global",
        "atom.global.release.add", "cp.async.bulk.wait_group ",
    ):
        assert instruction in code, instruction
    resources = cubin_resources(compiled.__cubin__)
    assert resources["spill_bytes"] == 0
    assert 0 < resources["registers"] <= registers(config)


GPU_CASES = [
    (problem(1, 1000, 1), SpanConfig(64, 64, 64, 6)),
    (problem(4, 8, 2), SpanConfig(64, 64, 64, 6)),
    (problem(5, 520, 2, "bfloat16"), SpanConfig(64, 128, 64, 4, rounds=2)),
    (problem(7, 1000, 4), SpanConfig(128, 128, 64, 3, cluster=2, rounds=3)),
    (problem(2, 1032, 3), SpanConfig(192, 128, 64, 4, 3, blocks_per_sm=1)),
    (problem(40, 264, 5, "bfloat16"), SpanConfig(128, 192, 64, 3, 2, blocks_per_sm=1, buffers=2, rounds=4)),
    (problem(300, 72, 3), SpanConfig(64, 64, 64, 6, rounds=2)),
    (problem(3, 640, 3), SpanConfig(128, 128, 64, 5, 2, blocks_per_sm=1)),
    (problem(1, 2048, 2), SpanConfig(64, 192, 64, 6, blocks_per_sm=1)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("asked", "config"), GPU_CASES, ids=lambda value: str(value).replace(" ", ""))
def test_results_match_separate_products_and_float64(
    asked: Problem, config: SpanConfig, hopper: DeviceFingerprint
) -> None:
    """The error is that of the same products one by one; symmetric; bit-equal runs; counters are zero again."""
    assert SPAN.is_legal(asked, config, hopper)
    op = ops()["gram_span"]
    launch = backends()["cutedsl"].compile(SPAN.build(asked, config, hopper), asked, hopper).launch
    r, coefficients = op.make_inputs(asked, "cuda", 1)
    coefficients = coefficients.contiguous()
    q = torch.full_like(r, float("nan"))
    work = torch.full((5, *r.shape), float("nan"), dtype=r.dtype, device="cuda")
    barriers = torch.zeros(asked.batch * 32, dtype=torch.int32, device="cuda")
    launch(r, coefficients, q, work, barriers)
    expected = op.reference(asked, r, coefficients)
    scale = expected.square().mean().sqrt()

    separate = one_by_one(r, coefficients)
    errors = [((found.double() - expected).square().mean().sqrt() / scale).item() for found in (q, separate)]
    assert errors[0] < 1.1 * errors[1] + 0.1 * torch.finfo(r.dtype).eps
    assert torch.equal(q, q.mT)
    first = q.clone()
    for _ in range(20):
        q.fill_(float("nan"))
        launch(r, coefficients, q, work, barriers)
        assert torch.equal(q, first)
    assert not barriers.any()


def one_by_one(r: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """The span by separate products in fp32, each rounded to the operands' dtype."""

    def product(a: torch.Tensor, b: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
        return alpha * torch.bmm(a.float(), b.float()) + beta * a.float()

    q = None
    for a, b, c in coefficients.tolist():
        wide = product(r, r, c, b)
        z = wide.to(r.dtype)
        q = (wide + a * torch.eye(r.shape[-1], device=r.device) if q is None else product(q, z, 1.0, a)).to(r.dtype)
        r = product(product(r, z, 1.0, a).to(r.dtype), z, 1.0, a).to(r.dtype)
    assert q is not None
    return q
