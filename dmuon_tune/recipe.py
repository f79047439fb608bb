"""Recipes: how a batch of equal matrices is orthogonalized: form, pieces, products, and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, get_args

from .problem import Problem

Form = Literal["gram", "plain", "small", "span"]
FORMS: tuple[str, ...] = get_args(Form)
MAX_BATCH_ELEMENTS = 2**28  # 512 MiB of fp16 a buffer: larger batches gain no speed and double the memory
WEIGHTS_DTYPE = "bfloat16"  # which most models are trained in
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
        most = max(1, MAX_BATCH_ELEMENTS // (rows * cols))
        result += [Group(size, rows, cols) for size in pieces(count, most)]
    return result


def pieces(batch: int, most: int | None) -> tuple[int, ...]:
    """Cut ``batch`` into as few pieces as hold at most ``most`` each (None: one piece), the larger ones first.

    Near-equal, so that at most two sizes occur.
    """
    count = 1 if most is None else -(-batch // most)
    return tuple(batch // count + (1 if piece < batch % count else 0) for piece in range(count))


@dataclass(frozen=True)
class Pick:
    """The kernel and configuration that one product of a recipe runs with.

    ``key`` is the SHA-256 of the tuning key it was chosen under: where today's differs (other code, other toolchain),
    the pick is stale.
    """

    problem: Problem
    kernel: str
    config: dict[str, Any] = field(hash=False)
    key: str

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Pick:
        return cls(**{**fields, "problem": Problem.from_dict(fields["problem"])})


@dataclass(frozen=True)
class Recipe:
    """How one group is orthogonalized: the chain's form, arithmetic and restarts, with its cost where known.

    The batch runs in ``pieces(batch, chunk)``, one after another (``chunk`` None: at once). ``picks`` are the kernels
    of every piece size's products; a product without one runs its own winner. Times are microseconds for the whole
    batch, from X in the chain's dtype to its polar factor; on a GPU from bf16 gradients and momentum to a bf16 result,
    where ``picks`` name the kernels of :func:`first_launch` and :func:`written` too. With percentiles ``cost_us`` is a
    timed chain's median, without them the sum of the winners' times over what was tuned of the chain. ``batch_costs``
    are (batch, median of a timed chain) at smaller batches, ascending.
    """

    group: Group
    form: str
    dtype: str
    steps: int = DEFAULT_STEPS
    restarts: tuple[int, ...] = DEFAULT_RESTARTS
    cost_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    chunk: int | None = None
    picks: tuple[Pick, ...] = ()
    batch_costs: tuple[tuple[int, float], ...] = ()

    @property
    def timed(self) -> bool:
        """Whether the whole chain was timed; else the cost is an estimate."""
        return self.p20_us is not None

    @property
    def pieces(self) -> tuple[int, ...]:
        """Matrices in each piece, in the order in which they run."""
        return pieces(self.group.batch, self.chunk)

    def products(self) -> dict[Problem, int]:
        """Every product of the whole batch, over all pieces, and how often each runs."""
        total: dict[Problem, int] = {}
        for size in self.pieces:
            piece = Group(size, self.group.rows, self.group.cols)
            for problem, count in chain(piece, self.form, self.dtype, self.steps, self.restarts).items():
                total[problem] = total.get(problem, 0) + count
        return total

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "timed": self.timed}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Recipe:
        given = {name: value for name, value in fields.items() if name != "timed"}
        return cls(**{
            **given,
            "group": Group(**given["group"]),
            "restarts": tuple(given["restarts"]),
            "picks": tuple(map(Pick.from_dict, given["picks"])),
            "batch_costs": tuple((batch, cost_us) for batch, cost_us in given["batch_costs"]),
        })


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
    would round R's small eigenvalues at the size of a: in fp16 twice the error on ill-conditioned input. Span form: the
    same, the steps between two restarts (:func:`spans`) in one launch from R to Q. Small form: all of it in one launch.
    """
    b, m, n, layout = group.batch, group.m, group.n, group.layout

    def symmetric(epilogue: str) -> Problem:
        return Problem("gemm_symmetric", b, m, m, m, dtype, dtype, "row", epilogue)

    def apply(epilogue: str) -> Problem:
        return Problem("apply", b, m, n, m, dtype, dtype, layout, epilogue)

    if form == "small":
        return {Problem("polar_small", b, m, n, m, dtype, dtype, layout, schedule(steps, restarts)): 1}
    gram = Problem("gram", b, m, m, n, dtype, dtype, layout)
    if form == "plain":
        return {gram: steps, symmetric("c"): steps, apply("c"): steps}
    lengths = spans(steps, restarts)
    count = len(lengths)
    if form == "span":
        whole = {span(b, m, dtype, length): times for length, times in Counter(lengths).items()}
        return {gram: count, **whole, apply("none"): count}
    # Every step has its Z; all but a span's first have Q ← QZ + aQ, and all but its last S and R.
    return {gram: count, symmetric("c"): steps + 3 * (steps - count), apply("none"): count}


def spans(steps: int, restarts: Iterable[int]) -> tuple[int, ...]:
    """How many steps the Gram form takes from each R = XXᵀ, in order; their sum is ``steps``."""
    begins = sorted({0, *(step for step in restarts if step < steps)})
    return tuple(end - begin for begin, end in pairwise([*begins, steps]))


def span(batch: int, m: int, dtype: str, steps: int) -> Problem:
    """The launch of so many steps from R to Q."""
    return Problem("gram_span", batch, m, m, m, dtype, dtype, "row", f"s{steps}")


def ends(
    group: Group,
    form: str,
    dtype: str,
    steps: int = DEFAULT_STEPS,
    restarts: tuple[int, ...] = DEFAULT_RESTARTS,
) -> dict[Problem, Problem | None]:
    """What an optimizer's step launches in place of this chain's ends: bf16 weights, Nesterov momentum.

    Each with the chain's product that it stands for; the first launch, momentum and norm, stands for none. The last
    product updates the weights (of the plain form after Q = Z + aI in the product before) or writes bf16.
    """
    products = list(chain(group, form, dtype, steps, restarts))
    last = products[-1]
    found: dict[Problem, Problem | None] = {first_launch(group, dtype): None}
    if form != "small":
        found[replace(written(last), epilogue="w")] = last
    if form == "plain":
        square = next(problem for problem in products if problem.op == "gemm_symmetric")
        found[replace(square, epilogue="ci")] = square
    if written(last) != last:
        found[written(last)] = last
    return found


def first_launch(group: Group, dtype: str) -> Problem:
    """From bf16 gradients to X in ``dtype``, with Nesterov momentum."""
    return Problem("momentum", group.batch, group.m, group.n, 1, WEIGHTS_DTYPE, dtype, "row", "n")


def written(last: Problem) -> Problem:
    """A chain's last product with a bf16 result."""
    return replace(last, out_dtype=WEIGHTS_DTYPE)


def end_for(end: Problem, weights_dtype: str) -> Problem:
    """One of :func:`ends` for gradients and weights of another dtype."""
    if end.op == "momentum":
        return replace(end, dtype=weights_dtype)
    return end if end.op == "gemm_symmetric" else replace(end, out_dtype=weights_dtype)


def schedule(steps: int, restarts: Iterable[int]) -> str:
    """The steps and restarts of a whole recurrence in one launch, as its problem's epilogue: ``s5r2``."""
    return f"s{steps}" + "".join(f"r{step}" for step in sorted(set(restarts)) if 0 < step < steps)


def forms(group: Group, dtype: str) -> tuple[str, ...]:
    """The forms worth comparing: the Gram form always; the plain form near square, where FLOPs are equal, and in bf16,
    where the Gram form may lose too much; for 16-bit chains the small form, whose arithmetic is fp16, and the span form
    (each only where a kernel serves it, which its kernels say)."""
    plain = ("plain",) if group.n < 2 * group.m or dtype == "bfloat16" else ()
    return ("gram", *plain) if dtype == "float32" else ("gram", "span", *plain, "small")


def default_dtype(device_kind: str) -> str:
    """The chain's arithmetic where none is asked: fp16 on a GPU; fp32 on a CPU, which multiplies fp16 slower."""
    return "float16" if device_kind == "cuda" else "float32"
