"""Runs one recipe's chain: the Gram or the plain form of Newton–Schulz, product by product, or all in one launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dmuon_tune.kernel_specs.polar_small import input_scale

SQUARES = {"gram": 4, "plain": 2, "small": 0}  # (batch, m, m) buffers that a form needs

Launch = Callable[..., Any]
Launches = Mapping[tuple[str, str], Launch]  # by (op, epilogue)
Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Last:
    """A chain's last product, not launched yet: αQX (+ βX), for ``out`` or any other place of x's shape."""

    q: Tensor
    x: Tensor
    out: Tensor
    scalars: tuple[float, ...]


@dataclass(frozen=True)
class Ending:
    """Another kernel of the last product, by piece size, and where it writes: of x's shape, in its own dtype."""

    launches: Mapping[int, Launch]
    out: Tensor


def run_pieces(
    form: str, launches: Mapping[int, Launches], pieces: Sequence[int], x: Tensor, y: Tensor,
    squares: Sequence[Tensor], triples: Sequence[Triple], restarts: Sequence[int], coefficients: Tensor | None = None,
    norm_factor: float = 1.0, ending: Ending | None = None,
) -> Tensor:
    """Orthogonalize ``x`` = ``input_scale(m)``·X, (batch, rows, cols), in place; returns x or y, which holds it, or the
    ``out`` of ``ending``.

    Consecutive pieces of the batch, ``pieces`` matrices each, run one after another with the launches of their size.
    ``y`` is another buffer of x's shape and dtype, ``squares`` are ``SQUARES[form]`` buffers (largest piece, m, m). In
    place of the triples form ``small`` reads ``coefficients``, a float32 tensor (steps, 3) on x's device, and
    ``norm_factor``, because it normalizes x, of any scale, itself.
    """
    start, result = 0, y
    for size in pieces:
        part = slice(start, start + size)
        if form == "small":
            assert coefficients is not None
            (launch,) = launches[size].values()
            last = Last(x[part], coefficients, y[part], (norm_factor,))
        else:
            launch = launches[size][last_product(form)]
            some = [square[:size] for square in squares]
            last = all_but_last(form, launches[size], x[part], y[part], some, triples, restarts)
        if ending is None:
            launch(last.q, last.x, last.out, *last.scalars)
            result = x if last.out.data_ptr() == x[part].data_ptr() else y
        else:
            ending.launches[size](last.q, last.x, ending.out[part], *last.scalars)
            result = ending.out
        start += size
    return result


def last_product(form: str) -> tuple[str, str]:
    """(op, epilogue) of the product that ends a chain of this form."""
    return ("apply", "c" if form == "plain" else "none")


def all_but_last(
    form: str, launches: Launches, x: Tensor, y: Tensor, squares: Sequence[Tensor], triples: Sequence[Triple],
    restarts: Sequence[int], with_identity: Launch | None = None,
) -> Last:
    """One piece up to its last product, which is returned.

    ``with_identity``, ``gemm_symmetric`` with epilogue ``ci``, makes the plain form's last product αQX as the Gram
    form's is: of Q = Z + aI.
    """
    scale = input_scale(squares[0].shape[-1])
    if form == "plain":
        return _plain(launches, x, y, squares, triples, scale, with_identity)
    return _gram(launches, x, y, squares, triples, restarts, scale)


def _gram(
    launches: Launches, x: Tensor, y: Tensor, squares: Sequence[Tensor], triples: Sequence[Triple],
    restarts: Sequence[int], scale: float,
) -> Last:
    """R is held as scale²·R until the first restart: Z = bR + cR² takes the scale into b and c, all else is linear."""
    gram, apply = launches["gram", "none"], launches["apply", "none"]
    symmetric = launches["gemm_symmetric", "c"]
    r, z, s, q = squares
    gram(x, r, 1.0)
    begins = True
    last = len(triples) - 1
    for step, (a, b, c) in enumerate(triples):
        if step in restarts:
            apply(q, x, y, 1.0 / scale)
            x, y, scale, begins = y, x, 1.0, True
            gram(x, r, 1.0)
        symmetric(r, r, r, z, c / scale**4, b / scale**2)
        if step < last and step + 1 not in restarts:
            symmetric(r, z, r, s, 1.0, a)
            symmetric(s, z, s, r, 1.0, a)
        if begins:
            z.diagonal(dim1=-2, dim2=-1).add_(a)
            q, z, begins = z, q, False
        else:
            symmetric(q, z, q, s, 1.0, a)
            q, s = s, q
    return Last(q, x, y, (1.0 / scale,))


def _plain(
    launches: Launches, x: Tensor, y: Tensor, squares: Sequence[Tensor], triples: Sequence[Triple], scale: float,
    with_identity: Launch | None,
) -> Last:
    """The first step takes the scale out."""
    gram, apply = launches["gram", "none"], launches["apply", "c"]
    symmetric = launches["gemm_symmetric", "c"]
    square, polynomial = squares
    end = len(triples) - 1
    for step, (a, b, c) in enumerate(triples):
        gram(x, square, 1.0)
        factors = c / scale**4, b / scale**2
        if step == end and with_identity is not None:
            with_identity(square, square, square, polynomial, *factors, a)
            break
        symmetric(square, square, square, polynomial, *factors)
        if step < end:
            apply(polynomial, x, y, 1.0 / scale, a / scale)
            x, y, scale = y, x, 1.0
    return Last(polynomial, x, y, (1.0 / scale,) if with_identity else (1.0 / scale, a / scale))
