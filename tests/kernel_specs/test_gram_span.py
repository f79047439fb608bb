"""``gram_span``: the op against its eigenvalues, and the vendor library's kernel against the op on odd shapes."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.kernel_specs import gram_span, kernel, kernels, ops
from dmuon_tune.measure.build import compile_kernel
from dmuon_tune.measure.verify import verify
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, chain, span

OP = ops()["gram_span"]
LIBRARY = kernel("gram_span.library")


def asked(batch: int, m: int, steps: int, dtype: str = "float32") -> Problem:
    return span(batch, m, dtype, steps)


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_each_eigenvalue_goes_through_the_scalar_recurrence(steps: int) -> None:
    problem = asked(2, 9, steps)
    r, coefficients = OP.make_inputs(problem, "cpu", steps)
    values, vectors = torch.linalg.eigh(r.double())
    factor = torch.ones_like(values)
    for a, b, c in coefficients.double().tolist():
        grown = a + b * values + c * values**2
        factor, values = factor * grown, values * grown**2
    assert torch.allclose(OP.reference(problem, r, coefficients), (vectors * factor.unsqueeze(-2)) @ vectors.mT)


@pytest.mark.parametrize(("m", "dtype"), list(product([1, 2, 3, 64, 129], ["float16", "bfloat16", "float32"])))
def test_inputs_are_symmetric_with_a_gram_matrix_spectrum_and_other_coefficients_each_step(m: int, dtype: str) -> None:
    r, coefficients = OP.make_inputs(asked(3, m, 4, dtype), "cpu", m)
    assert torch.equal(r, r.mT) and r.is_contiguous() and r.dtype == getattr(torch, dtype)
    values = torch.linalg.eigvalsh(r.double())
    assert 0 < float(values.min()) and float(values.max()) < 1.01
    assert coefficients.shape == (4, 3) and len(coefficients[:, 0].unique()) == 4
    assert m == 1 or not torch.equal(r[0], r[1])


def test_arguments_say_what_may_be_written() -> None:
    described = [(a.name, a.role, a.shape, a.dtype) for a in OP.arguments(asked(3, 16, 2, "bfloat16"))]
    assert described == [
        ("r", "input", (3, 16, 16), "bfloat16"), ("coefficients", "input", (2, 3), "float32"),
        ("q", "output", (3, 16, 16), "bfloat16"), ("work", "scratch", (5, 3, 16, 16), "bfloat16"),
        ("barriers", "zeros", (96,), "int32"),
    ]


@given(st.integers(1, 9), st.integers(1, 300), st.integers(1, 300), st.integers(1, 9), st.sets(st.integers(1, 10)))
def test_spans_have_the_flops_of_the_products_that_they_stand_for(
    batch: int, rows: int, cols: int, steps: int, restarts: set[int]
) -> None:
    group = Group(batch, rows, cols)
    total = {
        form: sum(n * ops()[p.op].flops(p) for p, n in chain(group, form, "float16", steps, tuple(restarts)).items())
        for form in ("gram", "span")
    }
    assert total["span"] == total["gram"]


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 40), st.integers(1, 6), st.sampled_from(["float16", "bfloat16", "float32"]),
    st.integers(0, 99),
)
def test_the_library_matches_the_reference_whatever_its_scratch_holds(
    batch: int, m: int, steps: int, dtype: str, seed: int
) -> None:
    problem, device = asked(batch, m, steps, dtype), fingerprint("cpu")
    launch = compile_kernel(LIBRARY, problem, LIBRARY.untuned(problem, device), device).launch
    verdict = verify(launch, OP, problem, "cpu", seed)
    assert not verdict.failure and (verdict.max_rel_err or 0.0) < gram_span.tolerance(problem)


def test_what_is_no_span_is_refused_by_every_kernel() -> None:
    device = fingerprint("cpu")
    wrong = {
        Problem("gram_span", 1, 8, 8, 8, epilogue="s5r2"): "must name its steps, like s3, not 's5r2'",
        Problem("gram_span", 1, 8, 8, 8): "must name its steps",
        Problem("gram_span", 1, 8, 9, 8, epilogue="s2"): "R is square",
        Problem("gram_span", 1, 8, 8, 8, layout="col", epilogue="s2"): "R is square",
        Problem("gram_span", 1, 8, 8, 8, "float16", "float32", epilogue="s2"): "writes its operand's dtype",
    }
    for spec in kernels("gram_span"):
        assert all(spec.refusal(problem, device) for problem in wrong), spec.name
    for problem, said in wrong.items():
        assert said in (LIBRARY.refusal(problem, device) or "")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_library_verifies_on_a_gpu_and_in_a_graph(dtype: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    problem, device = asked(3, 129, 3, dtype), fingerprint("cuda")
    launch = compile_kernel(LIBRARY, problem, LIBRARY.untuned(problem, device), device).launch
    assert not verify(launch, OP, problem, "cuda", 1).failure
    r, coefficients = OP.make_inputs(problem, "cuda", 1)
    q, work = torch.full_like(r, math.nan), r.new_empty(5, *r.shape)
    barriers = torch.zeros(3 * gram_span.BARRIERS, dtype=torch.int32, device="cuda")
    launch(r, coefficients, q, work, barriers)
    eager, graph = q.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(r, coefficients, q.fill_(math.nan), work, barriers)
    graph.replay()
    assert torch.equal(q, eager)
