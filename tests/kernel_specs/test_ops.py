"""The ops' contracts against naive loops, and the vendor library's kernels against the ops' references."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dmuon_tune.backends import backends
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernel, kernels, ops
from dmuon_tune.kernel_specs._inputs import torch_dtype, with_spectrum
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, chain
from dmuon_tune.space import enumerate_space
from dmuon_tune.spec import KernelSpec

ALPHA, BETA, GAMMA = 1.25, -0.75, 0.5
# Rounding of the result (half a unit in the last place) plus fp32 accumulation of up to 70 terms.
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.2e-2, "float32": 5e-6}
GRAM_SHAPES = [(1, 1, 1), (1, 1, 7), (2, 3, 5), (3, 17, 33), (1, 33, 17), (2, 64, 48), (1, 65, 70)]
SQUARE_SIDES = [(1, 1), (2, 3), (3, 17), (1, 64), (2, 65)]


def gram(batch: int, m: int, k: int, dtype: str = "float32", layout: str = "row") -> Problem:
    return Problem("gram", batch, m, m, k, dtype, dtype, layout)


def symmetric(batch: int, m: int, dtype: str = "float32", layout: str = "row", epilogue: str = "none") -> Problem:
    return Problem("gemm_symmetric", batch, m, m, m, dtype, dtype, layout, epilogue)


def applied(
    batch: int, m: int, n: int, dtype: str = "float32", layout: str = "row", epilogue: str = "none"
) -> Problem:
    return Problem("apply", batch, m, n, m, dtype, dtype, layout, epilogue)


def every_problem() -> Iterator[Problem]:
    """Ragged and whole shapes of each op, over dtypes, layouts and epilogues."""
    for dtype in TOLERANCE:
        for layout in ("row", "col"):
            yield from (gram(b, m, k, dtype, layout) for b, m, k in GRAM_SHAPES)
            for epilogue in ("none", "c", "i", "ci"):
                yield from (symmetric(b, m, dtype, layout, epilogue) for b, m in SQUARE_SIDES)
            for epilogue in ("none", "c"):
                yield from (applied(b, m, n, dtype, layout, epilogue) for b, m, n in GRAM_SHAPES)


def scalars(problem: Problem) -> list[float]:
    values = {"alpha": ALPHA, "beta": BETA, "gamma": GAMMA}
    arguments = ops()[problem.op].arguments(problem)
    return [values[argument.name] for argument in arguments if argument.role == "scalar"]


def logical(x: Tensor, layout: str) -> list[list[float]]:
    """One stored matrix as nested lists in its logical orientation."""
    rows: list[list[float]] = x.double().tolist()
    return rows if layout == "row" else [list(column) for column in zip(*rows, strict=True)]


def naive_product(left: list[list[float]], right_t: list[list[float]]) -> list[list[float]]:
    """left · right_tᵀ by loops."""
    return [[math.fsum(a * b for a, b in zip(row, other, strict=True)) for other in right_t] for row in left]


def naive(problem: Problem, inputs: tuple[Tensor, ...], index: int) -> list[list[float]]:
    """The op's definition for one matrix of the batch, written as loops over its logical operands."""
    if problem.op == "apply":
        q, x = inputs[0][index].double().tolist(), logical(inputs[1][index], problem.layout)
        result = naive_product(q, [list(column) for column in zip(*x, strict=True)])
        added = x
    else:
        a = logical(inputs[0][index], problem.layout)
        result = naive_product(a, logical(inputs[1][index], problem.layout) if problem.op != "gram" else a)
        added = inputs[2][index].double().tolist() if problem.has_c else result
    for i, row in enumerate(result):
        for j in range(len(row)):
            row[j] *= ALPHA
            row[j] += BETA * added[i][j] if problem.has_c else 0.0
            row[j] += GAMMA if problem.has_identity and i == j else 0.0
    return result


@pytest.mark.parametrize(
    "problem",
    [
        *(gram(2, 3, 5, layout=layout) for layout in ("row", "col")),
        *(symmetric(2, 5, layout=layout, epilogue=e) for layout in ("row", "col") for e in ("none", "c", "i", "ci")),
        *(applied(2, 3, 5, layout=layout, epilogue=e) for layout in ("row", "col") for e in ("none", "c")),
    ],
    ids=Problem.label,
)
def test_reference_equals_loops(problem: Problem) -> None:
    op = ops()[problem.op]
    inputs = op.make_inputs(problem, "cpu", 1)
    result = op.reference(problem, *inputs, *scalars(problem))
    assert result.dtype == torch.float64
    for index in range(problem.batch):
        expected = torch.tensor(naive(problem, inputs, index), dtype=torch.float64)
        as_stored = expected.T if problem.op == "apply" and problem.layout == "col" else expected
        assert torch.allclose(result[index], as_stored, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("problem", list(every_problem()), ids=Problem.label)
def test_arguments_describe_inputs_and_output(problem: Problem) -> None:
    op = ops()[problem.op]
    arguments = op.arguments(problem)
    inputs = op.make_inputs(problem, "cpu", 0)
    described = [(argument.shape, argument.dtype) for argument in arguments if argument.role == "input"]
    assert described == [(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in inputs]
    assert all(x.is_contiguous() and bool(x.isfinite().all()) for x in inputs)
    (output,) = (argument for argument in arguments if argument.role == "output")
    assert output.shape == tuple(op.reference(problem, *inputs, *scalars(problem)).shape)
    roles = [argument.role for argument in arguments]
    assert roles == sorted(roles, key=("input", "output", "scalar").index)


@pytest.mark.parametrize("name", sorted(ops()))
def test_inputs_follow_the_seed(name: str) -> None:
    epilogue = {"polar_small": "s5r2", "gram_span": "s3"}.get(name, "none")
    problem = Problem(name, 2, 9, 9, 9, "float32", "float32", "row", epilogue)
    make = ops()[name].make_inputs
    first, again, other = make(problem, "cpu", 3), make(problem, "cpu", 3), make(problem, "cpu", 4)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(first, other, strict=True))


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
@pytest.mark.parametrize("m", [1, 2, 3, 16, 33])
def test_symmetric_inputs_commute_exactly(m: int, dtype: str) -> None:
    """Rounding to the dtype keeps the structure, so every pair's product is itself exactly symmetric."""
    problem = symmetric(2, m, dtype, epilogue="c")
    matrices = [x.double() for x in ops()["gemm_symmetric"].make_inputs(problem, "cpu", 5)]
    for x in matrices:
        assert torch.equal(x, x.mT)
        assert float(torch.linalg.eigvalsh(x).abs().max()) <= 1 + 2.0**-7
    for x, y in zip(matrices, matrices[1:], strict=False):
        assert float((x @ y - y @ x).abs().max()) <= 1e-15 * m  # float64's own summation order
    if m > 4:
        assert matrices[0][0].unique().numel() > m // 2


def test_gram_inputs_have_unit_rows_and_a_marchenko_pastur_spectrum() -> None:
    problem = gram(1, 64, 1024)
    (x,) = ops()["gram"].make_inputs(problem, "cpu", 0)
    singular = torch.linalg.svdvals(x[0])
    edge = math.sqrt(problem.m / problem.k)
    assert math.isclose(float((x**2).sum(-1).mean()), 1.0, rel_tol=0.02)
    assert 1 - edge - 0.05 < float(singular.min()) < float(singular.max()) < 1 + edge + 0.05


def test_apply_inputs_show_a_transposed_factor() -> None:
    q, _ = ops()["apply"].make_inputs(applied(1, 48, 48), "cpu", 0)
    assert not torch.allclose(q, q.mT, atol=0.1)
    assert 0.7 < float(torch.linalg.eigvals(q[0]).abs().max()) < 1.3


@pytest.mark.parametrize("cols", [5, 12])
def test_with_spectrum_gives_those_singular_values(cols: int) -> None:
    asked = torch.tensor([3.0, 1.0, 0.5, 1e-3, 1e-6], dtype=torch.float64)
    assert torch.allclose(torch.linalg.svdvals(with_spectrum(asked, cols, seed=2)), asked, rtol=1e-9, atol=1e-14)


def test_with_spectrum_refuses_a_tall_matrix() -> None:
    with pytest.raises(ValueError, match="wide"):
        with_spectrum(torch.ones(5), 4)


def test_flops_and_bytes() -> None:
    by_name = ops()
    assert by_name["gram"].flops(gram(3, 4, 10)) == 3 * 4 * 4 * 10
    assert by_name["gemm_symmetric"].flops(symmetric(3, 4)) == 3 * 4**3
    assert by_name["apply"].flops(applied(3, 4, 10)) == 3 * 2 * 4 * 4 * 10
    assert by_name["gram"].bytes_moved(gram(3, 4, 10, "float16")) == 3 * 2 * (40 + 16)
    assert by_name["gemm_symmetric"].bytes_moved(symmetric(3, 4, epilogue="ci")) == 3 * 4 * (3 * 16 + 16)
    assert by_name["apply"].bytes_moved(applied(3, 4, 10, "bfloat16", epilogue="c")) == 3 * 2 * (16 + 2 * 40)


@pytest.mark.parametrize(("rows", "cols"), [(64, 256), (256, 64), (96, 96)])
def test_gram_chain_costs_what_the_formula_says(rows: int, cols: int) -> None:
    """5 steps and one restart: 6m²n + 14m³, symmetric products counted once; the plain form beside it."""
    group = Group(3, rows, cols)
    m, n = group.m, group.n
    total = {
        form: sum(count * ops()[p.op].flops(p) for p, count in chain(group, form, "float16").items())
        for form in ("gram", "plain")
    }
    assert total["gram"] == group.batch * (6 * m**2 * n + 14 * m**3)
    assert total["plain"] == group.batch * 5 * (3 * m**2 * n + m**3)


PRODUCTS = ("gram", "gemm_symmetric", "apply")
LIBRARY = [spec for spec in kernels() if spec.backend == "library"]


def launch_poisoned(spec: KernelSpec, problem: Problem, config: object, inputs: tuple[Tensor, ...]) -> Tensor:
    device = fingerprint("cpu")
    compiled = backends()[spec.backend].compile(spec.build(problem, config, device), problem, device)
    (output,) = (argument for argument in ops()[problem.op].arguments(problem) if argument.role == "output")
    out = torch.full(output.shape, math.nan, dtype=torch_dtype(output.dtype))
    compiled.launch(*inputs, out, *scalars(problem))
    return out


@pytest.mark.parametrize("problem", list(every_problem()), ids=Problem.label)
def test_library_kernels_match_the_reference(problem: Problem) -> None:
    spec, op, device = kernel(f"{problem.op}.library"), ops()[problem.op], fingerprint("cpu")
    inputs = op.make_inputs(problem, "cpu", 7)
    kept = [x.clone() for x in inputs]
    reference = op.reference(problem, *inputs, *scalars(problem))
    legal = spec.legal_space(problem, device)
    assert spec.Config() in legal
    for config in legal:
        out = launch_poisoned(spec, problem, config, inputs).double()
        error = (out - reference).abs() / (reference.abs() + reference.square().mean().sqrt())
        assert float(error.max()) <= TOLERANCE[problem.dtype], config
        assert all(torch.equal(x, y) for x, y in zip(inputs, kept, strict=True)), "an input was written"


@pytest.mark.parametrize("spec", [s for s in LIBRARY if s.op in PRODUCTS], ids=lambda spec: spec.name)
def test_library_says_what_it_does_not_serve(spec: KernelSpec) -> None:
    device = fingerprint("cpu")
    mixed = Problem(spec.op, 1, 8, 8, 8, "float16", "float32")
    assert "float32" in (spec.refusal(mixed, device) or "")
    assert spec.legal_space(mixed, device) == [] and spec.untuned(mixed, device) is None
    batched = Problem(spec.op, 2, 8, 8, 8, "float32", "float32")
    legal, single = spec.legal_space(batched, device), [*enumerate_space(spec.Config)]
    assert {config.entry for config in single} - {config.entry for config in legal} == {"addmm"}


def test_every_op_has_a_library_kernel() -> None:
    assert {spec.op for spec in LIBRARY} == set(ops())


EPILOGUES = {
    "gram": {"none"}, "gemm_symmetric": {"none", "c", "i", "ci"}, "apply": {"none", "c", "w"},
    "momentum": {"none", "m", "n"}, "polar_small": {"s5r2", "s1"}, "gram_span": {"s1"},
}
DEVICES = (
    DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 50 * 2**20, 140 * 2**30),
    DeviceFingerprint("CPU", "cpu-x86_64-avx2", 2, 0, 32 * 2**20, 0),
)


@pytest.mark.parametrize("spec", kernels(), ids=lambda spec: spec.name)
def test_no_kernel_serves_an_epilogue_of_another_op(spec: KernelSpec) -> None:
    for epilogue in set().union(*EPILOGUES.values()) - EPILOGUES[spec.op]:
        for dtype, device in itertools.product(("float16", "float32"), DEVICES):
            problem = Problem(spec.op, 2, 64, 64, 64, dtype, dtype, "row", epilogue)
            assert spec.refusal(problem, device), (epilogue, dtype, device.arch)
