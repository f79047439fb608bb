"""``polar_small``: its contract against loops, the vendor library's kernel, and what both refuse."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.errors import UsageError
from dmuon_tune.kernel_specs import kernel, ops
from dmuon_tune.kernel_specs._inputs import with_spectrum
from dmuon_tune.kernel_specs.polar_small import schedule
from dmuon_tune.kernel_specs.polar_small_library import recurrence
from dmuon_tune.measure.build import compile_kernel
from dmuon_tune.measure.verify import verify
from dmuon_tune.problem import Problem
from dmuon_tune.space import enumerate_space

OP, LIBRARY = ops()["polar_small"], kernel("polar_small.library")
POLAR_EXPRESS = [
    [7.8926, -20.383, 13.555], [3.9115, -2.5464, 0.4269], [3.7607, -2.5129, 0.4323], [3.1604, -2.1496, 0.3996],
    [2.1911, -1.4417, 0.3281],
]
SHAPES = [(1, 1, 1), (2, 3, 5), (3, 17, 33), (1, 33, 33), (5, 64, 200)]


def polar(
    batch: int, m: int, n: int, dtype: str = "float32", layout: str = "row", epilogue: str = "s5r2", out: str = ""
) -> Problem:
    return Problem("polar_small", batch, m, n, m, dtype, out or dtype, layout, epilogue)


@pytest.mark.parametrize(
    ("epilogue", "expected"), [("s1", (1, ())), ("s5r2", (5, (2,))), ("s12r3r10", (12, (3, 10)))]
)
def test_schedule_is_read(epilogue: str, expected: tuple[int, tuple[int, ...]]) -> None:
    assert schedule(polar(1, 4, 4, epilogue=epilogue)) == expected


@pytest.mark.parametrize("epilogue", ["none", "c", "s5r5", "s5r2r2", "s5r3r2"])
def test_wrong_schedules_are_refused(epilogue: str) -> None:
    asked = polar(1, 4, 4, epilogue=epilogue)
    with pytest.raises(UsageError, match="restarts"):
        schedule(asked)
    assert "restarts" in (LIBRARY.refusal(asked, fingerprint("cpu")) or "")


def test_library_refuses_a_tall_problem() -> None:
    assert "short side" in (LIBRARY.refusal(polar(1, 5, 4), fingerprint("cpu")) or "")


@pytest.mark.parametrize("layout", ["row", "col"])
def test_reference_equals_the_polynomials_of_the_singular_values(layout: str) -> None:
    problem = polar(2, 4, 6, layout=layout)
    u, coefficients = OP.make_inputs(problem, "cpu", 1)
    result = OP.reference(problem, u, coefficients, 1.05)
    assert result.dtype == torch.float64 and result.shape == u.shape
    left, sigma, right = torch.linalg.svd(u.double(), full_matrices=False)
    for index in range(problem.batch):
        values = [float(s) / (1.05 * math.hypot(*sigma[index].tolist())) for s in sigma[index]]
        for a, b, c in coefficients.double().tolist():
            values = [a * s + b * s**3 + c * s**5 for s in values]
        expected = left[index] * torch.tensor(values, dtype=torch.float64) @ right[index]
        assert torch.allclose(result[index], expected, atol=1e-10)


def test_flops_and_bytes() -> None:
    problem = polar(3, 4, 10, "bfloat16", out="float32")
    assert OP.flops(problem) == 3 * (6 * 4**2 * 10 + 14 * 4**3)
    assert OP.bytes_moved(problem) == 3 * 40 * (2 + 4)


@pytest.mark.parametrize(("layout", "dtype"), [("row", "float32"), ("col", "bfloat16"), ("col", "float32")])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_library_passes_the_check(shape: tuple[int, int, int], layout: str, dtype: str) -> None:
    device = fingerprint("cpu")
    for epilogue, out in (("s5r2", dtype), ("s3", "float32")):
        problem = polar(*shape, dtype, layout, epilogue, out)
        for config in enumerate_space(LIBRARY.Config):
            launch = compile_kernel(LIBRARY, problem, config, device).launch
            assert verify(launch, OP, problem, "cpu", seed=2).failure == ""


@pytest.mark.parametrize("form", ["plain", "gram"])
def test_the_check_finds_a_wrong_step_and_a_wrong_matrix(form: str) -> None:
    problem, device = polar(5, 9, 12), fingerprint("cpu")  # as many matrices as steps
    launch = compile_kernel(LIBRARY, problem, LIBRARY.Config(form), device).launch

    def swapped_steps(u: Tensor, coefficients: Tensor, y: Tensor, norm_factor: float) -> None:
        launch(u, coefficients[[0, 1, 2, 4, 3]], y, norm_factor)

    def swapped_matrices(u: Tensor, coefficients: Tensor, y: Tensor, norm_factor: float) -> None:
        launch(u.flip(0), coefficients, y, norm_factor)

    def no_factor(u: Tensor, coefficients: Tensor, y: Tensor, norm_factor: float) -> None:
        launch(u, coefficients, y, 1.0)

    for wrong in (swapped_matrices, no_factor):
        assert "relative error" in verify(wrong, OP, problem, "cpu", seed=0).failure
    # Steps nearly commute where σ is small; the check's coefficients are apart enough for a few seeds to tell.
    assert any(verify(swapped_steps, OP, problem, "cpu", seed).failure for seed in range(4))


@pytest.mark.parametrize("scale", [1e-30, 1e-9, 1e5, 1e30])
def test_library_does_not_see_the_scale(scale: float) -> None:
    problem, device = polar(2, 8, 16), fingerprint("cpu")
    launch = compile_kernel(LIBRARY, problem, LIBRARY.Config(), device).launch
    u, coefficients = OP.make_inputs(problem, "cpu", 0)
    one, scaled = torch.empty_like(u), torch.empty_like(u)
    launch(u, coefficients, one, 1.0)
    launch(u * scale, coefficients, scaled, 1.0)
    assert torch.allclose(one, scaled, atol=1e-5)


def test_library_on_zero_nan_and_inf() -> None:
    """Zero gives zero, a matrix with NaN or inf gives NaN; neighbours in the batch are untouched."""
    problem, device = polar(4, 8, 16), fingerprint("cpu")
    launch = compile_kernel(LIBRARY, problem, LIBRARY.Config("gram"), device).launch
    u, coefficients = OP.make_inputs(problem, "cpu", 0)
    u[0], u[1, 2, 3], u[2, 4, 5] = 0, math.nan, math.inf
    y = torch.empty_like(u)
    launch(u, coefficients, y, 1.0)
    assert bool((y[0] == 0).all() and y[1:3].isnan().all() and y[3].isfinite().all())


@pytest.mark.parametrize("form", ["plain", "gram"])
@pytest.mark.parametrize("m", [1, 33, 128])
def test_library_stays_in_range_in_fp16(m: int, form: str) -> None:
    """As on a GPU, with the gains of Polar Express, on the inputs with the largest and the smallest entries of XXᵀ."""
    one_value = torch.ones(1, m, 2 * m)
    spread = torch.randn(1, m, 2 * m, generator=torch.Generator().manual_seed(0))
    coefficients = torch.tensor(POLAR_EXPRESS)
    for u in (one_value, spread):
        half = recurrence(u, coefficients, 1.0, form, (2,), torch.float16).double()
        exact = OP.reference(polar(1, m, 2 * m), u, coefficients, 1.0)
        # At one value 1.06 = 7.89 − 20.38 + 13.56 cancels, in every entry alike: 4 %; out of range would be inf or 0.
        assert float((half - exact).norm() / exact.norm()) < 6e-2


def test_library_orthogonalizes() -> None:
    """With Polar Express's triples a matrix of condition 100 comes within a few percent of its polar factor."""
    sigma = torch.logspace(0, -2, 12, dtype=torch.float64)
    u = with_spectrum(sigma, 30).float().unsqueeze(0)
    problem, device = polar(1, 12, 30), fingerprint("cpu")
    y = torch.empty_like(u)
    compile_kernel(LIBRARY, problem, LIBRARY.Config("gram"), device).launch(u, torch.tensor(POLAR_EXPRESS), y, 1.0)
    assert float((torch.linalg.svdvals(y[0]) - 1).abs().max()) < 0.2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("form", ["plain", "gram"])
def test_library_can_be_captured(form: str) -> None:
    problem, device = polar(3, 64, 96, "bfloat16"), fingerprint("cuda")
    launch = compile_kernel(LIBRARY, problem, LIBRARY.Config(form), device).launch
    assert verify(launch, OP, problem, "cuda", seed=0).failure == ""
    u, coefficients = OP.make_inputs(problem, "cuda", 0)
    once, replayed = torch.empty_like(u), torch.empty_like(u)
    launch(u, coefficients, once, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(u, coefficients, replayed, 1.0)
    replayed.fill_(math.nan)
    graph.replay()
    assert torch.equal(once, replayed)
