"""Triton functions of ``polar_small``: one program orthogonalizes one matrix, from its norm to its result."""
# mypy: ignore-errors

import triton
import triton.language as tl

from ._triton_overlap import after_launches_before


@triton.jit
def _block(M: tl.constexpr, N: tl.constexpr, TALL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, first):
    """Offsets in memory and mask of columns ``first`` … of the wide matrix."""
    i = tl.arange(0, BLOCK_M)[:, None]
    j = first + tl.arange(0, BLOCK_N)[None, :]
    return (j * M + i if TALL else i * N + j), (i < M) & (j < N)


@triton.jit
def _shrink(largest):
    """The power of two that brings ``largest`` into 2¹⁰ … 2¹¹, if a float has it: squares and fp16 hold the rest."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF
    return (tl.minimum(264 - exponent, 254) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _normalizer(square, scale, norm_factor):
    """scale / (norm_factor · √square): 0 for a zero matrix, NaN where ``square`` is not finite."""
    return tl.where(square == 0, 0.0, scale / (norm_factor * tl.sqrt(square))) + 0.0 * square


@triton.jit
def _triple(coefficients, STEP: tl.constexpr, SCALE: tl.constexpr):
    """(a, b, c) of a step for SCALE·X."""
    a = tl.load(coefficients + 3 * STEP)
    b = tl.load(coefficients + 3 * STEP + 1) * (1 / (SCALE * SCALE))
    c = tl.load(coefficients + 3 * STEP + 2) * (1 / (SCALE * SCALE * SCALE * SCALE))
    return a, b, c


@triton.jit
def plain(
    u, coefficients, y, norm_factor,
    M: tl.constexpr, N: tl.constexpr, TALL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr, SCALE: tl.constexpr, OVERLAP: tl.constexpr,
):
    """X stays in registers: per step A = XXᵀ, Z = bA + cA², X ← ZX + aX."""
    after_launches_before(OVERLAP)
    base = tl.program_id(0).to(tl.int64) * (M * N)
    offsets, inside = _block(M, N, TALL, BLOCK_M, BLOCK_N, 0)
    wide = tl.load(u + base + offsets, mask=inside, other=0.0).to(tl.float32)
    wide *= _shrink(tl.max(tl.abs(wide)))
    wide *= _normalizer(tl.sum(wide * wide), SCALE, norm_factor)
    x = wide.to(tl.float16)
    for step in tl.static_range(STEPS):
        a, b, c = _triple(coefficients, step, SCALE)
        square = tl.dot(x, tl.trans(x))
        half = square.to(tl.float16)
        z = (c * tl.dot(half, half) + b * square).to(tl.float16)
        wide = tl.dot(z, x, a * x.to(tl.float32))
        x = wide.to(tl.float16)
    tl.store(y + base + offsets, (wide * (1 / SCALE)).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _wait_for_all(scratch, matrix, ROUND: tl.constexpr, BLOCKS: tl.constexpr):
    """Return when every block of this matrix has called for this round; what each stored before is then visible."""
    counter = scratch.to(tl.pointer_type(tl.int32)) + matrix
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < BLOCKS * (ROUND + 1):
        pass
    tl.debug_barrier()


@triton.jit
def _squares(scratch, matrix, ROUND: tl.constexpr, BLOCKS: tl.constexpr, BATCH: tl.constexpr, BLOCK_M: tl.constexpr):
    """Where a matrix's first block leaves its square in this round; the others' follow it.

    ``scratch`` holds a counter a matrix (zero at first), a factor a block, then the squares of each round.
    """
    i = tl.arange(0, BLOCK_M)
    place = (ROUND * BATCH + matrix).to(tl.int64) * (BLOCKS * BLOCK_M * BLOCK_M)
    return scratch + BATCH * (1 + BLOCKS) + place + i[:, None] * BLOCK_M + i[None, :]


@triton.jit
def _columns(
    u, first, shrink, M: tl.constexpr, N: tl.constexpr, TALL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Columns of U in fp16, and where they lie."""
    offsets, inside = _block(M, N, TALL, BLOCK_M, BLOCK_N, first)
    x = (tl.load(u + offsets, mask=inside, other=0.0).to(tl.float32) * shrink).to(tl.float16)
    return x, offsets, inside


@triton.jit
def gram(
    u, coefficients, y, norm_factor, scratch,
    M: tl.constexpr, N: tl.constexpr, TALL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr, SCALE: tl.constexpr, RESTART: tl.constexpr, BLOCKS: tl.constexpr, BATCH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """R = XXᵀ and Q stay in registers, X is read BLOCK_N columns at a time: for its largest entry, for R, for the
    restart's R (RESTART = 0: none) and for the result. After the restart QX is made again where it is needed.

    BLOCKS share a matrix's columns: each adds up all blocks' shares of R, in one order, and all take the same steps.
    """
    after_launches_before(OVERLAP)
    matrix = tl.program_id(0) // BLOCKS
    part = tl.program_id(0) % BLOCKS
    u += matrix.to(tl.int64) * (M * N)
    y += matrix.to(tl.int64) * (M * N)
    SPAN: tl.constexpr = (N + BLOCKS * BLOCK_N - 1) // (BLOCKS * BLOCK_N) * BLOCK_N
    begin = part * SPAN
    end = tl.minimum(begin + SPAN, N)
    largest = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(begin, end, BLOCK_N):
        offsets, inside = _block(M, N, TALL, BLOCK_M, BLOCK_N, first)
        largest = tl.maximum(largest, tl.abs(tl.load(u + offsets, mask=inside, other=0.0).to(tl.float32)))
    shrink = _shrink(tl.max(largest))
    r = tl.zeros((BLOCK_M, BLOCK_M), tl.float32)
    for first in range(begin, end, BLOCK_N):
        x, offsets, inside = _columns(u, first, shrink, M, N, TALL, BLOCK_M, BLOCK_N)
        r = tl.dot(x, tl.trans(x), r)
    relative = 1.0
    if BLOCKS > 1:
        factors = scratch + BATCH + matrix * BLOCKS
        squares = _squares(scratch, matrix, 0, BLOCKS, BATCH, BLOCK_M)
        tl.store(factors + part, shrink)
        tl.store(squares + part * (BLOCK_M * BLOCK_M), r)
        _wait_for_all(scratch, matrix, 0, BLOCKS)
        least = tl.min(tl.load(factors + tl.arange(0, BLOCKS), cache_modifier=".cg"))
        r = tl.zeros((BLOCK_M, BLOCK_M), tl.float32)
        for other in range(BLOCKS):
            ratio = least / tl.load(factors + other, cache_modifier=".cg")
            r += tl.load(squares + other * (BLOCK_M * BLOCK_M), cache_modifier=".cg") * (ratio * ratio)
        relative = least / shrink
    diagonal = tl.arange(0, BLOCK_M)[:, None] == tl.arange(0, BLOCK_M)[None, :]
    normalizer = _normalizer(tl.sum(tl.where(diagonal, r, 0.0)), SCALE, norm_factor)
    r *= normalizer * normalizer
    normalizer *= relative
    half = r.to(tl.float16)
    restarted = half
    q = half
    for step in tl.static_range(STEPS):
        a, b, c = _triple(coefficients, step, SCALE)
        if RESTART > 0 and step == RESTART:
            restarted = q
            r = tl.zeros((BLOCK_M, BLOCK_M), tl.float32)
            for first in range(begin, end, BLOCK_N):
                x, offsets, inside = _columns(u, first, shrink, M, N, TALL, BLOCK_M, BLOCK_N)
                x = (tl.dot(restarted, x) * normalizer).to(tl.float16)
                r = tl.dot(x, tl.trans(x), r)
            if BLOCKS > 1:
                squares = _squares(scratch, matrix, 1, BLOCKS, BATCH, BLOCK_M)
                tl.store(squares + part * (BLOCK_M * BLOCK_M), r)
                _wait_for_all(scratch, matrix, 1, BLOCKS)
                r = tl.zeros((BLOCK_M, BLOCK_M), tl.float32)
                for other in range(BLOCKS):
                    r += tl.load(squares + other * (BLOCK_M * BLOCK_M), cache_modifier=".cg")
            half = r.to(tl.float16)
        z32 = c * tl.dot(half, half) + b * half.to(tl.float32)
        z = z32.to(tl.float16)
        if step == 0 or step == RESTART:
            q = (z32 + tl.where(diagonal, a, 0.0)).to(tl.float16)
        else:
            q = tl.dot(q, z, a * q.to(tl.float32)).to(tl.float16)
        if step + 1 < STEPS and step + 1 != RESTART:
            s = tl.dot(half, z, a * half.to(tl.float32)).to(tl.float16)
            half = tl.dot(s, z, a * s.to(tl.float32)).to(tl.float16)
    for first in range(begin, end, BLOCK_N):
        x, offsets, inside = _columns(u, first, shrink, M, N, TALL, BLOCK_M, BLOCK_N)
        if RESTART > 0:
            x = (tl.dot(restarted, x) * normalizer).to(tl.float16)
            result = tl.dot(q, x) * (1 / SCALE)
        else:
            result = tl.dot(q, x) * (normalizer * (1 / SCALE))
        tl.store(y + offsets, result.to(y.dtype.element_ty), mask=inside)
