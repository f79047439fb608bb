"""TileLang programs for D = αABᵀ (+ βC) (+ γI), D symmetric: lower tiles only, mirrored as they are stored."""
# No `from __future__ import annotations`: TileLang reads a program's parameter annotations as objects. Each parameter
# needs its own T.Tensor: two that share one would be one buffer.
# mypy: ignore-errors

import math
from typing import Any

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem

from ._tilelang import TileConfig, program, symmetric_shape, triangle_tiles, uses_tma


def build(problem: Problem, config: TileConfig, device: DeviceFingerprint) -> tuple[Any, dict[str, Any], int]:
    """The op's program under its own argument list, what the compiler needs with it, and its shared memory."""
    body = _cpu_body(problem, config) if device.kind == "cpu" else _cuda_body(problem, config, device)
    signature = _gram_program if problem.op == "gram" else _gemm_program
    return program(signature(problem, body), problem, config, device, symmetric_shape(problem))


def _operand_shape(problem: Problem) -> tuple[int, int, int]:
    extents = (problem.m, problem.k) if problem.layout == "row" else (problem.k, problem.m)
    return (problem.batch, *extents)


def _gram_program(problem: Problem, body: Any) -> Any:
    import tilelang.language as T

    operand, square, dtype = _operand_shape(problem), (problem.batch, problem.m, problem.m), problem.dtype

    @T.prim_func
    def gram(x: T.Tensor(operand, dtype), r: T.Tensor(square, dtype), alpha: T.float32):
        body(x, x, r, r, alpha, T.float32(0), T.float32(0))

    return gram


def _gemm_program(problem: Problem, body: Any) -> Any:
    import tilelang.language as T

    operand, square, dtype = _operand_shape(problem), (problem.batch, problem.m, problem.m), problem.dtype

    if problem.epilogue == "none":

        @T.prim_func
        def gemm(
            a: T.Tensor(operand, dtype), b: T.Tensor(operand, dtype), d: T.Tensor(square, dtype), alpha: T.float32
        ):
            body(a, b, d, d, alpha, T.float32(0), T.float32(0))

    elif problem.epilogue == "c":

        @T.prim_func
        def gemm(
            a: T.Tensor(operand, dtype), b: T.Tensor(operand, dtype), c: T.Tensor(square, dtype),
            d: T.Tensor(square, dtype), alpha: T.float32, beta: T.float32,
        ):
            body(a, b, c, d, alpha, beta, T.float32(0))

    elif problem.epilogue == "i":

        @T.prim_func
        def gemm(
            a: T.Tensor(operand, dtype), b: T.Tensor(operand, dtype), d: T.Tensor(square, dtype),
            alpha: T.float32, gamma: T.float32,
        ):
            body(a, b, d, d, alpha, T.float32(0), gamma)

    else:

        @T.prim_func
        def gemm(
            a: T.Tensor(operand, dtype), b: T.Tensor(operand, dtype), c: T.Tensor(square, dtype),
            d: T.Tensor(square, dtype), alpha: T.float32, beta: T.float32, gamma: T.float32,
        ):
            body(a, b, c, d, alpha, beta, gamma)

    return gemm


def _cuda_body(problem: Problem, config: TileConfig, device: DeviceFingerprint) -> Any:
    """One block a tile that touches the lower triangle.

    Tiles are numbered by groups of ``group`` rows of tiles, the least number of rows (times ``panel``) after which the
    diagonal meets a tile's corner again: first the columns that all of the group's rows have, column by column, then
    the staircase along the diagonal, row by row.
    """
    import tilelang.language as T

    m, k, dtype = problem.m, problem.k, problem.dtype
    tile_m, tile_n, tile_k = config.tile_m, config.tile_n, config.tile_k
    row_layout, has_c, has_identity = problem.layout == "row", problem.has_c, problem.has_identity
    tma = uses_tma(problem, symmetric_shape(problem), device)
    tiles, tile_rows, tile_cols = triangle_tiles(m, tile_m, tile_n), math.ceil(m / tile_m), math.ceil(m / tile_n)
    period = math.lcm(tile_m, tile_n) // tile_m
    group = period * math.ceil(config.panel / period)
    columns = group * tile_m // tile_n  # by which a group is wider than the one above
    stairs = [((row + 1) * tile_m - 1) // tile_n + 1 for row in range(group)]
    stair_starts = [sum(stairs[:row]) for row in range(group)]
    square_term, linear_term = group * columns / 2, sum(stairs) - group * columns / 2
    a_tile, b_tile = ((tile_m, tile_k), (tile_n, tile_k)) if row_layout else ((tile_k, tile_m), (tile_k, tile_n))

    def group_start(index):
        return group * columns * (index * (index - 1) // 2) + sum(stairs) * index

    def group_estimate(tile):  # positive root of square_term·g² + linear_term·g = tile, exact to one
        root = T.sqrt(T.float32(linear_term**2) + T.float32(4 * square_term) * T.cast(tile, "float32"))
        return T.cast((root - T.float32(linear_term)) * T.float32(0.5 / square_term), "int32")

    def stair_row(index):
        return sum((T.cast(index >= start, "int32") for start in stair_starts[1:]), T.int32(0))

    def stair_column(index):
        passed = zip(stairs, stair_starts[1:], strict=False)
        return index - sum((T.cast(index >= start, "int32") * width for width, start in passed), T.int32(0))

    def load(x, tile, batch, row, step):  # no macro: that would bind the row and hide its alignment
        origin = x[batch, row, step] if row_layout else x[batch, step, row]
        return T.copy(origin, tile, disable_tma=not tma)

    @T.macro
    def body(a, b, c, d, alpha, beta, gamma):
        with T.Kernel(tiles * problem.batch, threads=config.threads) as block:
            batch = block // tiles
            g = T.alloc_var("int32")
            index = T.alloc_var("int32")
            height = T.alloc_var("int32")
            tile_i = T.alloc_var("int32")
            tile_j = T.alloc_var("int32")
            g = 0
            if tile_rows > group:
                g = group_estimate(block % tiles)
                if group_start(g) > block % tiles:
                    g = g - 1
                if group_start(g + 1) <= block % tiles:
                    g = g + 1
            index = block % tiles - group_start(g)
            height = T.min(group, tile_rows - g * group)
            if index < height * columns * g:
                tile_i = g * group + T.truncmod(index, height)
                tile_j = T.truncdiv(index, height)
            else:
                index = index - height * columns * g
                tile_i = g * group + stair_row(index)
                tile_j = g * columns + stair_column(index)
            # A bound value shared with the epilogue keeps this arithmetic ahead of TileLang's split into loading and
            # computing warps; elsewhere the plain product lets it prove alignment and vectorize.
            row = tile_i * tile_m
            col = tile_j * tile_n
            if not tma:
                T.assume(tile_i >= 0 and tile_i < tile_rows)
                T.assume(tile_j >= 0 and tile_j < tile_cols)
            a_shared = T.alloc_shared(a_tile, dtype)
            b_shared = T.alloc_shared(b_tile, dtype)
            lower = T.alloc_shared((tile_m, tile_n), dtype)
            upper = T.alloc_shared((tile_n, tile_m), dtype)
            acc = T.alloc_fragment((tile_m, tile_n), "float32")
            T.clear(acc)
            for step in T.Pipelined(T.ceildiv(k, tile_k), num_stages=config.stages):
                load(a, a_shared, batch, row if tma else tile_i * tile_m, step * tile_k)
                load(b, b_shared, batch, col if tma else tile_j * tile_n, step * tile_k)
                T.gemm(a_shared, b_shared, acc, transpose_A=not row_layout, transpose_B=row_layout)
            T.assume(tile_i >= 0 and tile_i < tile_rows)
            T.assume(tile_j >= 0 and tile_j < tile_cols)
            for i, j in T.Parallel(tile_m, tile_n):
                acc[i, j] = acc[i, j] * alpha
            if has_c:
                T.copy(c[batch, tile_i * tile_m, tile_j * tile_n], lower, disable_tma=True)
                for i, j in T.Parallel(tile_m, tile_n):
                    acc[i, j] = acc[i, j] + beta * T.cast(lower[i, j], "float32")
            if has_identity:
                for i, j in T.Parallel(tile_m, tile_n):
                    if tile_i * tile_m + i == tile_j * tile_n + j:
                        acc[i, j] = acc[i, j] + gamma
            T.copy(acc, lower)
            for i, j in T.Parallel(tile_m, tile_n):
                upper[j, i] = acc[i, j]
            # Off the diagonal both tiles are stored whole. On it an element and its mirror image both come from r ≥ c,
            # so nothing is written twice.
            if col + tile_n <= row:
                T.copy(lower, d[batch, tile_i * tile_m, tile_j * tile_n])
                T.copy(upper, d[batch, tile_j * tile_n, tile_i * tile_m])
            else:
                for i, j in T.Parallel(tile_m, tile_n):
                    if tile_i * tile_m + i >= tile_j * tile_n + j and tile_i * tile_m + i < m:
                        d[batch, tile_i * tile_m + i, tile_j * tile_n + j] = lower[i, j]
                for j, i in T.Parallel(tile_n, tile_m):
                    if tile_i * tile_m + i > tile_j * tile_n + j and tile_i * tile_m + i < m:
                        d[batch, tile_j * tile_n + j, tile_i * tile_m + i] = upper[j, i]

    return body


def _cpu_body(problem: Problem, config: TileConfig) -> Any:
    """Tiles in turn on one core; operands are staged in fp32 with the result's columns innermost, to vectorize."""
    import tilelang.language as T

    m, k, dtype = problem.m, problem.k, problem.dtype
    tile_m, tile_n, tile_k = config.tile_m, config.tile_n, config.tile_k
    row_layout, has_c, has_identity = problem.layout == "row", problem.has_c, problem.has_identity

    @T.macro
    def load(x, tile, batch, row, step, rows):
        for kk, i in T.grid(tile_k, rows):  # zero in an else: GCC 12 miscompiles a zero store before a guarded one
            if row + i < m and step + kk < k:
                if row_layout:
                    tile[kk, i] = T.cast(x[batch, row + i, step + kk], "float32")
                else:
                    tile[kk, i] = T.cast(x[batch, step + kk, row + i], "float32")
            else:
                tile[kk, i] = 0.0

    @T.macro
    def body(a, b, c, d, alpha, beta, gamma):
        with T.Kernel(math.ceil(m / tile_n), math.ceil(m / tile_m), problem.batch, threads=1) as (
            tile_j, tile_i, batch,
        ):
            row = tile_i * tile_m
            col = tile_j * tile_n
            a_local = T.alloc_local((tile_k, tile_m), "float32")
            b_local = T.alloc_local((tile_k, tile_n), "float32")
            acc = T.alloc_local((tile_m, tile_n), "float32")
            if col < T.min(row + tile_m, m):
                for i, j in T.grid(tile_m, tile_n):
                    acc[i, j] = 0.0
                for step in T.serial(T.ceildiv(k, tile_k)):
                    load(a, a_local, batch, row, step * tile_k, tile_m)
                    load(b, b_local, batch, col, step * tile_k, tile_n)
                    for i, quad, j in T.grid(tile_m, tile_k // 4, tile_n):
                        acc[i, j] = (
                            acc[i, j]
                            + a_local[quad * 4, i] * b_local[quad * 4, j]
                            + a_local[quad * 4 + 1, i] * b_local[quad * 4 + 1, j]
                            + a_local[quad * 4 + 2, i] * b_local[quad * 4 + 2, j]
                            + a_local[quad * 4 + 3, i] * b_local[quad * 4 + 3, j]
                        )
                for i, j in T.grid(tile_m, tile_n):
                    if row + i >= col + j and row + i < m:
                        acc[i, j] = acc[i, j] * alpha
                        if has_c:
                            acc[i, j] = acc[i, j] + beta * T.cast(c[batch, row + i, col + j], "float32")
                        if has_identity:
                            if row + i == col + j:
                                acc[i, j] = acc[i, j] + gamma
                        d[batch, row + i, col + j] = T.cast(acc[i, j], dtype)
                        if row + i > col + j:
                            d[batch, col + j, row + i] = T.cast(acc[i, j], dtype)

    return body
