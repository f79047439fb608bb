"""Triton functions of the products: the lower tiles of a symmetric αABᵀ + βC + γI, and the tiles of αQX + βX."""
# mypy: ignore-errors

import triton
import triton.language as tl

from ._triton_overlap import after_launches_before


@triton.jit
def _triangle_row(index):
    """The row of ``index`` in a triangle numbered row by row; the root is exact to one."""
    row = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    row -= (row * (row + 1) // 2 > index).to(tl.int32)
    row += ((row + 1) * (row + 2) // 2 <= index).to(tl.int32)
    return row


@triton.jit
def _lower_tile(
    index, M: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, PANEL: tl.constexpr
):
    """(tile_i, tile_j) of the ``index``-th tile that touches the lower triangle.

    A step is the longer of the tile's sides: step s of the staircase has TALL rows of WIDE·(s + 1) tiles. PANEL steps
    are swept together, column by column, up to the first's diagonal; the rest of them, the staircase, row by row.
    """
    STEP: tl.constexpr = TILE_M if TILE_M > TILE_N else TILE_N
    TALL: tl.constexpr = STEP // TILE_M
    WIDE: tl.constexpr = STEP // TILE_N
    STEPS: tl.constexpr = (M + STEP - 1) // STEP
    panel = _triangle_row(index // (TALL * WIDE)) // PANEL
    first = panel * PANEL
    rest = index - TALL * WIDE * (first * (first + 1) // 2)
    height = TALL * tl.minimum(PANEL, STEPS - first)
    shared = height * WIDE * first
    stair = tl.maximum(rest - shared, 0)
    step = _triangle_row(stair // (TALL * WIDE))
    stair -= TALL * WIDE * (step * (step + 1) // 2)
    length = WIDE * (step + 1)
    in_stair = rest >= shared
    tile_i = TALL * first + tl.where(in_stair, TALL * step + stair // length, rest % height)
    # The panel's columns before the diagonal hold every one of its rows; its staircase starts right of them.
    tile_j = tl.where(in_stair, WIDE * first + stair % length, rest // height)
    return tile_i, tile_j


@triton.jit
def _operand(
    x, first, step, EXTENT: tl.constexpr, INNER: tl.constexpr, INNER_LAST: tl.constexpr, TILE: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """A TILE×TILE_K tile of an EXTENT×INNER operand, stored so or (INNER_LAST false) transposed; zero outside."""
    rows = first + tl.arange(0, TILE)
    inner = step + tl.arange(0, TILE_K)
    if INNER_LAST:
        inside = (rows < EXTENT)[:, None] & (inner < INNER)[None, :]
        tile = tl.load(x + rows[:, None] * INNER + inner[None, :], mask=inside, other=0.0)
    else:
        inside = (inner < INNER)[:, None] & (rows < EXTENT)[None, :]
        tile = tl.trans(tl.load(x + inner[:, None] * EXTENT + rows[None, :], mask=inside, other=0.0))
    return tile


@triton.jit
def symmetric(
    a, b, c, d, alpha, beta, gamma,
    M: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr, HAS_C: tl.constexpr, HAS_I: tl.constexpr,
    TILES: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, PANEL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """D = αABᵀ (+ βC) (+ γI), D symmetric: one program a tile that touches the lower triangle, stored twice."""
    batch = (tl.program_id(0) // TILES).to(tl.int64)
    tile_i, tile_j = _lower_tile(tl.program_id(0) % TILES, M, TILE_M, TILE_N, PANEL)
    first_row = tile_i * TILE_M
    first_col = tile_j * TILE_N
    after_launches_before(OVERLAP)
    if first_row < M and first_col < M:
        a += batch * (M * K)
        b += batch * (M * K)
        acc = tl.zeros((TILE_M, TILE_N), tl.float32)
        for step in range(0, K, TILE_K):
            left = _operand(a, first_row, step, M, K, ROW, TILE_M, TILE_K)
            right = _operand(b, first_col, step, M, K, ROW, TILE_N, TILE_K)
            acc = tl.dot(left, tl.trans(right), acc)
        rows = first_row + tl.arange(0, TILE_M)
        cols = first_col + tl.arange(0, TILE_N)
        inside = (rows < M)[:, None] & (cols < M)[None, :]
        lower = batch * (M * M) + rows[:, None] * M + cols[None, :]
        acc *= alpha
        if HAS_C:
            acc += beta * tl.load(c + lower, mask=inside, other=0.0).to(tl.float32)
        if HAS_I:
            acc += tl.where(rows[:, None] == cols[None, :], gamma, 0.0)
        result = acc.to(d.dtype.element_ty)
        mirrored = tl.trans(result)
        upper = batch * (M * M) + cols[:, None] * M + rows[None, :]
        mirrored_inside = (cols < M)[:, None] & (rows < M)[None, :]
        # On the diagonal an element and its mirror image both come from row ≥ col, so nothing is written twice.
        if first_col + TILE_N <= first_row:
            tl.store(d + lower, result, mask=inside)
            tl.store(d + upper, mirrored, mask=mirrored_inside)
        elif TILE_M == TILE_N:  # the tile is its own mirror image: one whole store
            tl.store(d + lower, tl.where(rows[:, None] >= cols[None, :], result, mirrored), mask=inside)
        else:
            tl.store(d + lower, result, mask=inside & (rows[:, None] >= cols[None, :]))
            tl.store(d + upper, mirrored, mask=mirrored_inside & (rows[None, :] > cols[:, None]))


@triton.jit
def apply(
    q, x, y, alpha, beta,
    ROWS: tl.constexpr, COLS: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr, HAS_C: tl.constexpr,
    TILES: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, PANEL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The stored ROWS×COLS matrix Y: αQX (+ βX) in ``row`` layout, αXQᵀ (+ βX) in ``col``; one program a tile."""
    TILE_ROWS: tl.constexpr = (ROWS + TILE_M - 1) // TILE_M
    TILE_COLS: tl.constexpr = (COLS + TILE_N - 1) // TILE_N
    batch = (tl.program_id(0) // TILES).to(tl.int64)
    index = tl.program_id(0) % TILES
    first_tile = index // (PANEL * TILE_COLS) * PANEL
    height = tl.minimum(PANEL, TILE_ROWS - first_tile)
    index %= PANEL * TILE_COLS
    first_row = (first_tile + index % height) * TILE_M
    first_col = index // height * TILE_N
    after_launches_before(OVERLAP)
    x += batch * (ROWS * COLS)
    q += batch * (K * K)
    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    for step in range(0, K, TILE_K):
        if ROW:
            left = _operand(q, first_row, step, ROWS, K, True, TILE_M, TILE_K)
            right = _operand(x, first_col, step, COLS, K, False, TILE_N, TILE_K)
        else:
            left = _operand(x, first_row, step, ROWS, K, True, TILE_M, TILE_K)
            right = _operand(q, first_col, step, COLS, K, True, TILE_N, TILE_K)
        acc = tl.dot(left, tl.trans(right), acc)
    rows = first_row + tl.arange(0, TILE_M)
    cols = first_col + tl.arange(0, TILE_N)
    inside = (rows < ROWS)[:, None] & (cols < COLS)[None, :]
    places = rows[:, None] * COLS + cols[None, :]
    acc *= alpha
    if HAS_C:
        acc += beta * tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + batch * (ROWS * COLS) + places, acc.to(y.dtype.element_ty), mask=inside)
