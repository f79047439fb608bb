"""Scratch and counters: what verification finds out about them, and that each launch that is timed has its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.kernel_specs import kernel, ops
from dmuon_tune.measure.rotation import cold_sets
from dmuon_tune.measure.timing import time_launch
from dmuon_tune.measure.verify import verify
from dmuon_tune.recipe import span

OP, PROBLEM, CPU = ops()["gram_span"], span(2, 6, "float32", 2), fingerprint("cpu")
LIBRARY = kernel("gram_span.library").build(PROBLEM, kernel("gram_span.library").Config(), CPU)


def beyond(tensor: Tensor, distance: int) -> Tensor:
    """One element, ``distance`` after the first of this tensor."""
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + distance)


def reads_scratch(r: Tensor, coefficients: Tensor, q: Tensor, work: Tensor, barriers: Tensor) -> None:
    before = work[4].clone()
    LIBRARY(r, coefficients, q, work, barriers)
    q.add_(0.0 * before)


def leaves_a_counter(r: Tensor, coefficients: Tensor, q: Tensor, work: Tensor, barriers: Tensor) -> None:
    LIBRARY(r, coefficients, q, work, barriers)
    barriers[7] += 1


def expects_zeros(r: Tensor, coefficients: Tensor, q: Tensor, work: Tensor, barriers: Tensor) -> None:
    assert barriers.dtype == torch.int32 and not barriers.any()
    barriers.add_(1)
    LIBRARY(r, coefficients, q, work, barriers)
    barriers.sub_(1)


def writes_beyond_scratch(r: Tensor, coefficients: Tensor, q: Tensor, work: Tensor, barriers: Tensor) -> None:
    LIBRARY(r, coefficients, q, work, barriers)
    beyond(work, work.numel()).fill_(0.0)


def writes_before_counters(r: Tensor, coefficients: Tensor, q: Tensor, work: Tensor, barriers: Tensor) -> None:
    LIBRARY(r, coefficients, q, work, barriers)
    beyond(barriers, -1).fill_(0)


def works_in_its_input(r: Tensor, coefficients: Tensor, q: Tensor, work: Tensor, barriers: Tensor) -> None:
    LIBRARY(r, coefficients, q, work, barriers)
    r.mul_(2.0)


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        (LIBRARY, ""), (expects_zeros, ""), (reads_scratch, "not finite"), (leaves_a_counter, "counters at zero"),
        (writes_beyond_scratch, "outside its output"), (writes_before_counters, "outside its output"),
        (works_in_its_input, "changed its inputs"),
    ],
)
def test_verification_finds_out_what_a_launch_does_to_them(launch: Callable[..., Any], said: str) -> None:
    failure = verify(launch, OP, PROBLEM, "cpu", 3).failure
    assert said in failure if said else not failure


def test_every_set_of_rotating_arguments_has_scratch_and_counters_of_its_own() -> None:
    sets = cold_sets(OP, PROBLEM, "cpu", CPU, 0)[1](4).launched
    assert len(sets) == 4
    assert len({work.data_ptr() for *_, work, _ in sets}) == len({zeros.data_ptr() for *_, zeros in sets}) == 4
    assert not any(bool(zeros.any()) for *_, zeros in sets)
    assert time_launch(expects_zeros, OP, PROBLEM, "cpu", CPU, 0).sets > 1
