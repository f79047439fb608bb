"""Runs one recipe's chain: the Gram form of Newton–Schulz or the plain one, by products, by spans or in one launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dmuon_tune import recipe
from dmuon_tune.kernel_specs import gram_span
from dmuon_tune.kernel_specs.polar_small import input_scale
from dmuon_tune.spec import Argument

SQUARES = {"gram": 4, "plain": 2, "small": 0, "span": 2}  # (batch, m, m) buffers that pass between a form's launches

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


def work(form: str, batch: int, m: int, dtype: str) -> list[Argument]:
    """The buffers that a form works on, for pieces of up to ``batch`` matrices: its squares, and a span's own work."""
    squares = [Argument(f"s{place}", "scratch", (batch, m, m), dtype) for place in range(SQUARES[form])]
    own = gram_span.arguments(recipe.span(batch, m, dtype, steps=1)) if form == "span" else ()
    return squares + [argument for argument in own if argument.role in ("scratch", "zeros")]


def cut(buffers: Sequence[Tensor], size: int, most: int) -> list[Tensor]:
    """Contiguous views of :func:`work` buffers, made for ``most`` matrices, for ``size`` of them."""
    if size == most:
        return list(buffers)
    flat = [buffer.view(-1)[: buffer.numel() // most * size] for buffer in buffers]
    return [
        part if buffer.ndim == 1 else part.view(*buffer.shape[:-3], size, *buffer.shape[-2:])
        for part, buffer in zip(flat, buffers, strict=True)
    ]


def tables(form: str, triples: Sequence[Triple], restarts: Sequence[int], m: int) -> list[tuple[Triple, ...]]:
    """The coefficients that launches read from device memory, float32 (steps, 3) each, in order.

    Form ``small``: all of them. Form ``span``: those of each span, the first one's for scale²·R, as X is held.
    """
    if form != "span":
        return [tuple(triples)] if form == "small" else []
    found: list[tuple[Triple, ...]] = []
    start, scale = 0, input_scale(m)
    for length in recipe.spans(len(triples), restarts):
        found.append(tuple((a, b / scale**2, c / scale**4) for a, b, c in triples[start : start + length]))
        start, scale = start + length, 1.0
    return found


def run_pieces(
    form: str, launches: Mapping[int, Launches], pieces: Sequence[int], x: Tensor, y: Tensor,
    buffers: Sequence[Tensor], triples: Sequence[Triple], restarts: Sequence[int], coefficients: Sequence[Tensor] = (),
    norm_factor: float = 1.0, ending: Ending | None = None,
) -> Tensor:
    """Orthogonalize ``x`` = ``input_scale(m)``·X, (batch, rows, cols), in place; returns x or y, which holds it, or the
    ``out`` of ``ending``.

    Consecutive pieces of the batch, ``pieces`` matrices each, run one after another with the launches of their size.
    ``y`` is another buffer of x's shape and dtype, ``buffers`` are those of :func:`work` for the largest piece,
    ``coefficients`` those of :func:`tables` on x's device. Form ``small`` normalizes x, of any scale, itself, by
    ``norm_factor``.
    """
    start, result = 0, y
    for size in pieces:
        part = slice(start, start + size)
        if form == "small":
            (launch,) = launches[size].values()
            last = Last(x[part], coefficients[0], y[part], (norm_factor,))
        else:
            launch = launches[size][last_product(form)]
            some = cut(buffers, size, max(pieces))
            last = all_but_last(form, launches[size], x[part], y[part], some, triples, restarts, coefficients)
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
    form: str, launches: Launches, x: Tensor, y: Tensor, buffers: Sequence[Tensor], triples: Sequence[Triple],
    restarts: Sequence[int], coefficients: Sequence[Tensor] = (), with_identity: Launch | None = None,
) -> Last:
    """One piece up to its last product, which is returned; ``buffers`` and ``coefficients`` as for :func:`run_pieces`.

    ``with_identity``, ``gemm_symmetric`` with epilogue ``ci``, makes the plain form's last product αQX as the Gram
    form's is: of Q = Z + aI.
    """
    scale = input_scale(buffers[0].shape[-1])
    if form == "plain":
        return _plain(launches, x, y, buffers, triples, scale, with_identity)
    if form == "span":
        return _spans(launches, x, y, buffers, coefficients, scale)
    return _gram(launches, x, y, buffers, triples, restarts, scale)


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


def _spans(
    launches: Launches, x: Tensor, y: Tensor, buffers: Sequence[Tensor], coefficients: Sequence[Tensor], scale: float
) -> Last:
    """As :func:`_gram`, the scale taken out of the first span's coefficients."""
    gram, apply = launches["gram", "none"], launches["apply", "none"]
    r, q, *own = buffers
    for place, table in enumerate(coefficients):
        if place:
            apply(q, x, y, 1.0 / scale)
            x, y, scale = y, x, 1.0
        gram(x, r, 1.0)
        launches["gram_span", f"s{len(table)}"](r, table, q, *own)
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
