"""``apply`` in TileLang: Y = αQX (+ βX), one block a tile of Y as it is stored."""
# No `from __future__ import annotations`: TileLang reads a program's parameter annotations as objects. Each parameter
# needs its own T.Tensor: two that share one would be one buffer.
# mypy: ignore-errors

import math
from typing import Any

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem
from dmuon_tune.spec import KernelSpec

from . import _tilelang
from ._tilelang import TileConfig, apply_shape, uses_tma
from ._tilelang_untuned import heuristic


def refusal(problem: Problem, device: DeviceFingerprint) -> str | None:
    return _tilelang.refusal(problem, device, apply_shape(problem), ("none", "c"))


def illegality(problem: Problem, config: TileConfig, device: DeviceFingerprint) -> str | None:
    return _tilelang.illegality(problem, config, device, apply_shape(problem))


def build(problem: Problem, config: TileConfig, device: DeviceFingerprint) -> tuple[Any, dict[str, Any], int]:
    """The program what the compiler needs with it, and its shared memory."""
    body = _cpu_body(problem, config) if device.kind == "cpu" else _cuda_body(problem, config, device)
    return _tilelang.program(_function(problem, body), problem, config, device, apply_shape(problem))


def _function(problem: Problem, body: Any) -> Any:
    import tilelang.language as T

    shape, dtype = apply_shape(problem), problem.dtype
    factor, matrix = (problem.batch, problem.m, problem.m), (problem.batch, shape.rows, shape.cols)

    if problem.has_c:

        @T.prim_func
        def apply(
            q: T.Tensor(factor, dtype), x: T.Tensor(matrix, dtype), y: T.Tensor(matrix, dtype),
            alpha: T.float32, beta: T.float32,
        ):
            body(q, x, y, alpha, beta)

    else:

        @T.prim_func
        def apply(
            q: T.Tensor(factor, dtype), x: T.Tensor(matrix, dtype), y: T.Tensor(matrix, dtype), alpha: T.float32
        ):
            body(q, x, y, alpha, T.float32(0))

    return apply


def _cuda_body(problem: Problem, config: TileConfig, device: DeviceFingerprint) -> Any:
    """Stored rows×cols: QX in ``row`` layout, XQᵀ in ``col``. ``panel`` rows of tiles are swept column by column."""
    import tilelang.language as T

    shape, dtype, row_layout, has_beta = apply_shape(problem), problem.dtype, problem.layout == "row", problem.has_c
    rows, cols, k = shape.rows, shape.cols, shape.k
    tile_m, tile_n, tile_k, panel = config.tile_m, config.tile_n, config.tile_k, config.panel
    tile_rows, tile_cols = math.ceil(rows / tile_m), math.ceil(cols / tile_n)
    tiles = tile_rows * tile_cols
    tma = uses_tma(problem, shape, device)
    right_tile = (tile_k, tile_n) if row_layout else (tile_n, tile_k)

    def load_right(right, tile, batch, col, step):  # no macro: that would bind the column and hide its alignment
        origin = right[batch, step, col] if row_layout else right[batch, col, step]
        return T.copy(origin, tile, disable_tma=not tma)

    @T.macro
    def product(left, right, x, y, alpha, beta):
        with T.Kernel(tiles * problem.batch, threads=config.threads) as block:
            batch = block // tiles
            first = T.alloc_var("int32")
            height = T.alloc_var("int32")
            index = T.alloc_var("int32")
            tile_i = T.alloc_var("int32")
            tile_j = T.alloc_var("int32")
            first = (block % tiles) // (panel * tile_cols) * panel
            height = T.min(panel, tile_rows - first)
            index = (block % tiles) % (panel * tile_cols)
            tile_i = first + T.truncmod(index, height)
            tile_j = T.truncdiv(index, height)
            # A bound value shared with the epilogue keeps this arithmetic ahead of TileLang's split into loading and
            # computing warps; elsewhere the plain product lets it prove alignment and vectorize.
            row = tile_i * tile_m
            col = tile_j * tile_n
            if not tma:
                T.assume(tile_i >= 0)
                T.assume(tile_j >= 0)
            left_shared = T.alloc_shared((tile_m, tile_k), dtype)
            right_shared = T.alloc_shared(right_tile, dtype)
            staged = T.alloc_shared((tile_m, tile_n), dtype)
            acc = T.alloc_fragment((tile_m, tile_n), "float32")
            T.clear(acc)
            for step in T.Pipelined(T.ceildiv(k, tile_k), num_stages=config.stages):
                T.copy(left[batch, row if tma else tile_i * tile_m, step * tile_k], left_shared, disable_tma=not tma)
                load_right(right, right_shared, batch, col if tma else tile_j * tile_n, step * tile_k)
                T.gemm(left_shared, right_shared, acc, transpose_B=not row_layout)
            T.assume(tile_i >= 0)
            T.assume(tile_j >= 0)
            for i, j in T.Parallel(tile_m, tile_n):
                acc[i, j] = acc[i, j] * alpha
            if has_beta:
                T.copy(x[batch, tile_i * tile_m, tile_j * tile_n], staged, disable_tma=True)
                for i, j in T.Parallel(tile_m, tile_n):
                    acc[i, j] = acc[i, j] + beta * T.cast(staged[i, j], "float32")
            T.copy(acc, staged)
            T.copy(staged, y[batch, row if tma else tile_i * tile_m, col if tma else tile_j * tile_n])

    @T.macro
    def body(q, x, y, alpha, beta):
        if row_layout:
            product(q, x, x, y, alpha, beta)
        else:
            product(x, q, x, y, alpha, beta)

    return body


def _cpu_body(problem: Problem, config: TileConfig) -> Any:
    """Tiles in turn on one core; operands are staged in fp32 with the result's columns innermost, to vectorize."""
    import tilelang.language as T

    shape, dtype, row_layout, has_beta = apply_shape(problem), problem.dtype, problem.layout == "row", problem.has_c
    rows, cols, k = shape.rows, shape.cols, shape.k
    tile_m, tile_n, tile_k = config.tile_m, config.tile_n, config.tile_k

    @T.macro
    def load(q, x, left, right, batch, row, col, step):
        for i, kk in T.grid(tile_m, tile_k):  # zero in an else: GCC 12 miscompiles a zero store before a guarded one
            if row + i < rows and step + kk < k:
                if row_layout:
                    left[i, kk] = T.cast(q[batch, row + i, step + kk], "float32")
                else:
                    left[i, kk] = T.cast(x[batch, row + i, step + kk], "float32")
            else:
                left[i, kk] = 0.0
        for kk, j in T.grid(tile_k, tile_n):
            if col + j < cols and step + kk < k:
                if row_layout:
                    right[kk, j] = T.cast(x[batch, step + kk, col + j], "float32")
                else:
                    right[kk, j] = T.cast(q[batch, col + j, step + kk], "float32")
            else:
                right[kk, j] = 0.0

    @T.macro
    def body(q, x, y, alpha, beta):
        with T.Kernel(math.ceil(cols / tile_n), math.ceil(rows / tile_m), problem.batch, threads=1) as (
            tile_j, tile_i, batch,
        ):
            row = tile_i * tile_m
            col = tile_j * tile_n
            left = T.alloc_local((tile_m, tile_k), "float32")
            right = T.alloc_local((tile_k, tile_n), "float32")
            acc = T.alloc_local((tile_m, tile_n), "float32")
            for i, j in T.grid(tile_m, tile_n):
                acc[i, j] = 0.0
            for step in T.serial(T.ceildiv(k, tile_k)):
                load(q, x, left, right, batch, row, col, step * tile_k)
                for i, quad, j in T.grid(tile_m, tile_k // 4, tile_n):
                    acc[i, j] = (
                        acc[i, j]
                        + left[i, quad * 4] * right[quad * 4, j]
                        + left[i, quad * 4 + 1] * right[quad * 4 + 1, j]
                        + left[i, quad * 4 + 2] * right[quad * 4 + 2, j]
                        + left[i, quad * 4 + 3] * right[quad * 4 + 3, j]
                    )
            for i, j in T.grid(tile_m, tile_n):
                if row + i < rows and col + j < cols:
                    acc[i, j] = acc[i, j] * alpha
                    if has_beta:
                        acc[i, j] = acc[i, j] + beta * T.cast(x[batch, row + i, col + j], "float32")
                    y[batch, row + i, col + j] = T.cast(acc[i, j], dtype)

    return body


KERNEL = KernelSpec(
    "apply", "tilelang", TileConfig, refusal, build, (__name__, _tilelang.__name__), illegality, heuristic
)
