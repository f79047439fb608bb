"""``apply`` with the weights' update in its epilogue: the contract against loops, and the vendor library's kernel."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dmuon_tune.backends import backends
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.kernel_specs import kernel, ops
from dmuon_tune.measure.verify import verify
from dmuon_tune.problem import Problem

OP = ops()["apply"]


def update(batch: int, m: int, n: int, out_dtype: str, layout: str = "row", dtype: str = "bfloat16") -> Problem:
    return Problem("apply", batch, m, n, m, dtype, out_dtype, layout, "w")


@pytest.mark.parametrize("layout", ["row", "col"])
def test_the_reference_is_the_update_written_as_loops(layout: str) -> None:
    asked = update(2, 3, 4, "float32", layout)
    q, x, w, rates = OP.make_inputs(asked, "cpu", 1)
    result: Tensor = OP.reference(asked, q, x, w, rates, 1.25)
    assert result.dtype == torch.float64 and result.shape == w.shape
    at = (lambda i, j: (i, j)) if layout == "row" else (lambda i, j: (j, i))
    for b, i, j in itertools.product(range(2), range(3), range(4)):
        product = sum(float(q[b, i, k]) * float(x[b][at(k, j)]) for k in range(3))
        decay, rate = rates[b].tolist()
        assert result[b][at(i, j)].item() == pytest.approx(decay * float(w[b][at(i, j)]) - rate * 1.25 * product)


def test_arguments_say_that_weights_lie_apart_and_are_updated() -> None:
    asked = update(3, 8, 16, "float32", "col")
    q, x, w, rates, alpha = OP.arguments(asked)
    assert (w.role, w.separate, w.shape, w.dtype) == ("inout", True, (3, 16, 8), "float32")
    assert [argument.role for argument in (q, x, rates, alpha)] == ["input", "input", "input", "scalar"]
    inputs = OP.make_inputs(asked, "cpu", 0)
    described = [(a.shape, a.dtype) for a in (q, x, w, rates)]
    assert described == [(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in inputs]
    assert len(set(inputs[3].flatten().tolist())) == 6  # a matrix updated at another's rates shows


def test_the_update_reads_and_writes_the_weights_once() -> None:
    assert OP.bytes_moved(update(3, 4, 10, "float32")) == 3 * (2 * (16 + 40) + 2 * 4 * 40 + 8)
    assert OP.flops(update(3, 4, 10, "float32")) == 3 * 2 * 4 * 4 * 10


@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize(("dtype", "out_dtype"), [("bfloat16", "float32"), ("float16", "bfloat16")])
def test_the_library_updates_by_address_on_a_cpu(dtype: str, out_dtype: str, layout: str) -> None:
    asked, spec, device = update(3, 17, 33, out_dtype, layout, dtype), kernel("apply.library"), fingerprint("cpu")
    launch = backends()["library"].compile(spec.build(asked, spec.untuned(asked, device), device), asked, device).launch
    verdict = verify(launch, OP, asked, "cpu", 5)
    assert verdict.failure == "" and verdict.max_rel_err is not None

    def at_the_next_ones_rates(q: Tensor, x: Tensor, w: Tensor, rates: Tensor, alpha: float) -> None:
        launch(q, x, w, rates.roll(1, 0), alpha)

    assert "relative error" in verify(at_the_next_ones_rates, OP, asked, "cpu", 5).failure


def test_kernels_without_the_update_say_so() -> None:
    gpu = fingerprint("cpu").__class__("H200", "sm_90", 132, 232448, 2**20, 2**30)
    asked = update(1, 8, 8, "bfloat16")
    assert "address" in (kernel("apply.library").refusal(asked, gpu) or "")
    assert kernel("apply.tilelang").refusal(asked, gpu)
    assert "'i'" in (kernel("apply.library").refusal(Problem("apply", 1, 8, 8, 8, epilogue="i"), gpu) or "")
