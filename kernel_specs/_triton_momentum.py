"""The two passes of ``momentum`` in Triton: update and sums of squares, then scale and cast."""
# mypy: ignore-errors

import triton
import triton.language as tl

from ._triton_overlap import after_launches_before

# Squares of both 2^50·U and 2^-50·U are summed in fp32: the first holds norms from 2^-110 to 2^13, the second from
# there to 2^110.
UP = tl.constexpr(2.0**50)
DOWN = tl.constexpr(2.0**-50)
LARGEST_SUM = tl.constexpr(2.0**126)


@triton.jit
def squares(
    gradients, momenta, partials, mu,
    MODE: tl.constexpr, DTYPE: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Pass 1: M ← μM + G; ``partials`` (batch, PROGRAMS, 2) get each program's two sums of squares of U."""
    after_launches_before(OVERLAP)
    matrix = tl.program_id(0) // PROGRAMS
    program = tl.program_id(0) % PROGRAMS
    g = tl.load(gradients + matrix)
    m = tl.load(momenta + matrix)
    if (g | m) % 16 == 0:
        up, down = _sums(g, m, program, mu, MODE, DTYPE, COUNT, BLOCK, PROGRAMS, True)
    else:
        up, down = _sums(g, m, program, mu, MODE, DTYPE, COUNT, BLOCK, PROGRAMS, False)
    at = partials + tl.program_id(0).to(tl.int64) * 2
    tl.store(at, up)
    tl.store(at + 1, down)


@triton.jit
def _sums(
    g, m, program, mu,
    MODE: tl.constexpr, DTYPE: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The program's two sums of squares, over every PROGRAMS-th block."""
    g = _pointer(g, DTYPE, ALIGNED)
    m = _pointer(m, DTYPE, ALIGNED)
    FULL: tl.constexpr = COUNT // BLOCK
    lane = tl.arange(0, BLOCK)
    up = tl.zeros([BLOCK], tl.float32)
    down = tl.zeros([BLOCK], tl.float32)
    for block in range(program, FULL, PROGRAMS):
        start = tl.cast(block, tl.int64) * BLOCK
        u = _updated(g + start + lane, m + start + lane, None, mu, MODE)
        up += (u * UP) * (u * UP)
        down += (u * DOWN) * (u * DOWN)
    if COUNT % BLOCK != 0:
        if program == FULL % PROGRAMS:
            start = tl.full([], FULL * BLOCK, tl.int64)
            u = _updated(g + start + lane, m + start + lane, lane < COUNT - FULL * BLOCK, mu, MODE)
            up += (u * UP) * (u * UP)
            down += (u * DOWN) * (u * DOWN)
    return tl.sum(up), tl.sum(down)


@triton.jit
def _pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A new pointer: the hint of alignment belongs to the operation that makes it, and so to all who use that."""
    pointer = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _updated(g, m, mask, mu, MODE: tl.constexpr):
    """U of one block in fp32, after M's update in place where MODE has one."""
    u = _read(g, mask)
    if MODE != "none":
        kept = (mu * _read(m, mask) + u).to(m.dtype.element_ty)
        tl.store(m, kept, mask=mask)
        if MODE == "n":
            u = mu * kept.to(tl.float32) + u
        else:
            u = kept.to(tl.float32)
    return u


@triton.jit
def _read(at, mask):
    if mask is None:
        return tl.load(at).to(tl.float32)
    else:
        return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def scaled(
    gradients, momenta, partials, x, mu, scale, eps, batch,
    MODE: tl.constexpr, DTYPE: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
    OVERLAP: tl.constexpr, PADDED: tl.constexpr,
):
    """Pass 2: X = scale · U / (‖U‖_F + eps). It begins with what pass 1 read last, which may still be in the L2."""
    after_launches_before(OVERLAP)
    matrix = batch - 1 - tl.program_id(0) // PROGRAMS
    program = tl.program_id(0) % PROGRAMS
    factor = _factor(partials + matrix.to(tl.int64) * (2 * PROGRAMS), scale, eps, PROGRAMS, PADDED)
    g = tl.load(gradients + matrix)
    m = tl.load(momenta + matrix)
    x += matrix.to(tl.int64) * COUNT
    if (g | m) % 16 == 0:
        _write(g, m, x, program, mu, factor, MODE, DTYPE, COUNT, BLOCK, PROGRAMS, True)
    else:
        _write(g, m, x, program, mu, factor, MODE, DTYPE, COUNT, BLOCK, PROGRAMS, False)


@triton.jit
def _factor(partials, scale, eps, PROGRAMS: tl.constexpr, PADDED: tl.constexpr):
    """scale / (norm + eps): 0 where that is 0, NaN where the norm is not finite."""
    lane = tl.arange(0, PADDED)
    up = tl.sum(tl.load(partials + 2 * lane, mask=lane < PROGRAMS, other=0.0))
    down = tl.sum(tl.load(partials + 2 * lane + 1, mask=lane < PROGRAMS, other=0.0))
    norm = tl.where(up < LARGEST_SUM, tl.sqrt(up) * DOWN, tl.sqrt(down) * UP)
    divisor = norm + eps
    return tl.where(divisor == 0.0, 0.0, scale / divisor) + 0.0 * norm


@triton.jit
def _write(
    g, m, x, program, mu, factor,
    MODE: tl.constexpr, DTYPE: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    g = _pointer(g, DTYPE, ALIGNED)
    m = _pointer(m, DTYPE, ALIGNED)
    FULL: tl.constexpr = COUNT // BLOCK
    lane = tl.arange(0, BLOCK)
    if COUNT % BLOCK != 0:
        if program == 0:
            start = tl.full([], FULL * BLOCK, tl.int64)
            mask = lane < COUNT - FULL * BLOCK
            u = _again(g + start + lane, m + start + lane, mask, mu, MODE)
            tl.store(x + start + lane, (u * factor).to(x.dtype.element_ty), mask=mask)
    for index in range(program, FULL, PROGRAMS):
        start = tl.cast(FULL - 1 - index, tl.int64) * BLOCK
        u = _again(g + start + lane, m + start + lane, None, mu, MODE)
        tl.store(x + start + lane, (u * factor).to(x.dtype.element_ty))


@triton.jit
def _again(g, m, mask, mu, MODE: tl.constexpr):
    """U of one block in fp32, from M as it was updated."""
    if MODE == "none":
        u = _read(g, mask)
    elif MODE == "m":
        u = _read(m, mask)
    else:
        u = mu * _read(m, mask) + _read(g, mask)
    return u
