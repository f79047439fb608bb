"""Recipes: which products orthogonalize a batch of equal matrices, how often each runs, and how batches are cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .problem import Problem

Form = Literal["gram", "plain"]
MAX_BATCH_ELEMENTS = 2**28  # 512 MiB of fp16 a buffer: larger batches gain no speed and double the memory
DEFAULT_STEPS = 5
DEFAULT_RESTARTS = (2,)


@dataclass(frozen=True, order=True)
class Group:
    """``batch`` matrices of ``rows``×``cols`` (as stored) that are orthogonalized together."""

    batch: int
    rows: int
    cols: int

    @property
    def m(self) -> int:
        """The short side: the order of the Gram matrix."""
        return min(self.rows, self.cols)

    @property
    def n(self) -> int:
        """The long side."""
        return max(self.rows, self.cols)

    @property
    def layout(self) -> str:
        """``row`` where the m×n matrix is stored as it is, ``col`` where the stored matrix is tall."""
        return "row" if self.rows <= self.cols else "col"

    def label(self) -> str:
        return f"{self.batch}x{self.rows}x{self.cols}"


def groups(shapes: Iterable[tuple[int, int]]) -> list[Group]:
    """Cut a model's matrices (rows, cols) into batches of equal shape, as the optimizer will run them.

    A shape that occurs more often than fits ``MAX_BATCH_ELEMENTS`` is cut into near-equal batches, so at most two
    batch sizes a shape need tuning. Order: first occurrence.
    """
    result: list[Group] = []
    for (rows, cols), count in Counter(shapes).items():
        pieces = -(-count // max(1, MAX_BATCH_ELEMENTS // (rows * cols)))
        result += [
            Group(count // pieces + (1 if piece < count % pieces else 0), rows, cols) for piece in range(pieces)
        ]
    return result


@dataclass(frozen=True)
class Recipe:
    """How one group is orthogonalized: the chain's form, arithmetic and restarts, with its cost where known.

    ``cost_us`` is the sum of the winners' times over the chain's products, in microseconds for the whole batch.
    """

    group: Group
    form: str
    dtype: str
    steps: int = DEFAULT_STEPS
    restarts: tuple[int, ...] = DEFAULT_RESTARTS
    cost_us: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Recipe:
        return cls(**{**fields, "group": Group(**fields["group"]), "restarts": tuple(fields["restarts"])})


def chain(
    group: Group,
    form: str,
    dtype: str,
    steps: int = DEFAULT_STEPS,
    restarts: tuple[int, ...] = DEFAULT_RESTARTS,
) -> dict[Problem, int]:
    """The products of one orthogonalization and how often each runs.

    Plain form, a step: A = XXᵀ, B = bA + cA², X ← aX + BX. Gram form, m ≤ n: R = XXᵀ; a step: Z = cR² + bR,
    S = RZ + aR, R ← SZ + aS (both skipped where R isn't needed again), Q ← QZ + aQ (at the first step and after a
    restart Q = Z + aI, a is added to Z's diagonal in place); before a restart step X ← QX, R = XXᵀ; last X ← QX.
    ``restarts`` holds the steps (counted from 0) before which to restart. Folding aI into P = Z + aI for all products
    would round R's small eigenvalues at the size of a: in fp16 twice the error on ill-conditioned input.
    """
    b, m, n, layout = group.batch, group.m, group.n, group.layout

    def symmetric(epilogue: str) -> Problem:
        return Problem("gemm_symmetric", b, m, m, m, dtype, dtype, "row", epilogue)

    def apply(epilogue: str) -> Problem:
        return Problem("apply", b, m, n, m, dtype, dtype, layout, epilogue)

    gram = Problem("gram", b, m, m, n, dtype, dtype, layout)
    if form == "plain":
        return {gram: steps, symmetric("c"): steps, apply("c"): steps}
    begins = {0, *restarts}
    spans = len([step for step in begins if step < steps])
    # Every step has its Z; all but a span's first have Q ← QZ + aQ, and all but its last S and R.
    return {gram: spans, symmetric("c"): steps + 3 * (steps - spans), apply("none"): spans}


def forms(group: Group) -> tuple[str, ...]:
    """The forms worth comparing: the Gram form always; the plain form only near square, where FLOPs are equal."""
    return ("gram", "plain") if group.n < 2 * group.m else ("gram",)


def default_form(group: Group) -> str:
    """The form where none was timed: the one of fewer FLOPs in a library that counts symmetric products in full.

    Five steps with one restart: plain 20·m²n + 10·m³, Gram 8·m²n + 28·m³, equal at n = 1.5·m. Near square the plain
    form is also the more accurate one in fp16.
    """
    return "plain" if 2 * group.n < 3 * group.m else "gram"


def default_dtype(device_kind: str) -> str:
    """The chain's arithmetic where none is asked: fp16 on a GPU; fp32 on a CPU, which multiplies fp16 slower."""
    return "float16" if device_kind == "cuda" else "float32"
