# mypy: ignore-errors
"""Epilogue of the CuTe DSL symmetric product: α, β·C and γ·I in fp32, then a tile and its mirror image to memory."""

from __future__ import annotations

from math import gcd

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, pipeline
from cutlass.cute.nvgpu import warp

from dmuon_tune.problem import Problem

from ._cutedsl_space import EPILOGUE_COLS, PAD, SymmetricConfig, epilogue_rows

DTYPES = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}


class SymmetricEpilogue:
    """Stores the elements (r, c) of a tile with r ≥ c, and their mirror images (c, r) where r > c, each once."""

    def __init__(self, problem: Problem, config: SymmetricConfig) -> None:
        self.batch, self.m = problem.batch, problem.m
        self.dtype, self.out_dtype = DTYPES[problem.dtype], DTYPES[problem.out_dtype]
        self.has_c, self.has_identity = problem.has_c, problem.has_identity
        self.tile = (config.tile_m, config.tile_n)
        self.warpgroups, self.consumers = config.warpgroups, 128 * config.warpgroups
        self.epilogue_rows = epilogue_rows(config)
        self.vector = gcd(self.m, 8)  # elements of the widest aligned access, up to 16 bytes

    @cute.jit
    def epilogue_buffers(self, smem):
        """A slice of the tile twice, both indexed (row, column): rows contiguous, and columns contiguous."""
        rows, cols = self.epilogue_rows, EPILOGUE_COLS
        direct = smem.allocate_tensor(
            self.out_dtype, cute.make_layout((rows, cols), stride=(cols + PAD, 1)), byte_alignment=128
        )
        mirror = smem.allocate_tensor(
            self.out_dtype, cute.make_layout((rows, cols), stride=(1, rows + PAD)), byte_alignment=128
        )
        return direct, mirror

    @cute.jit
    def finish(self, acc, places, c, alpha, beta, gamma, batch, row0, col0):
        """acc ← α·acc + β·C + γ·I, in fp32."""
        pair = gcd(self.m, 2)
        if cutlass.const_expr(self.has_c):
            pairs = cute.make_tensor(
                c.iterator,
                cute.make_layout(
                    (pair, self.m // pair, self.m, self.batch), stride=(1, pair, self.m, self.m * self.m)
                ),
            )
            held = cute.make_rmem_tensor(pair, self.dtype)
        for step in cutlass.range(cute.size(acc) // pair, unroll_full=True):
            v = step * pair
            r, col = row0 + places[v][0], col0 + places[v][1]
            if cutlass.const_expr(self.has_c):
                # Elements outside the matrix read its edge: they are never stored.
                inside_r, inside_c = cutlass.min(r, self.m - 1), cutlass.min(col // pair, self.m // pair - 1)
                cute.autovec_copy(pairs[(None, inside_c, inside_r, Int64(batch))], held)
            for e in cutlass.range_constexpr(pair):
                value = alpha * acc[v + e]
                if cutlass.const_expr(self.has_c):
                    value = value + beta * held[e].to(Float32)
                if cutlass.const_expr(self.has_identity):
                    value = value + (gamma if r == col + e else Float32(0.0))
                acc[v + e] = value

    @cute.jit
    def store(self, acc, tiled_mma, direct, mirror, d, batch, row0, col0, thread):
        """Through shared memory, one slice of the tile after another, so that both copies leave coalesced."""
        slice_rows, slice_cols = self.epilogue_rows, EPILOGUE_COLS
        barrier = pipeline.NamedBarrier(barrier_id=1, num_threads=self.consumers)
        rounded = cute.make_rmem_tensor(acc.shape, self.out_dtype)
        rounded.store(acc.load().to(self.out_dtype))
        to_direct, from_direct = self._register_copy(False, tiled_mma, rounded, direct, thread)
        to_mirror, from_mirror = self._register_copy(True, tiled_mma, rounded, mirror, thread)
        copy_direct, copy_mirror = self._copy(False, tiled_mma), self._copy(True, tiled_mma)
        atoms = cute.size(to_direct, mode=[2])
        for i in cutlass.range_constexpr(self.tile[0] // slice_rows):
            for j in cutlass.range_constexpr(self.tile[1] // slice_cols):
                top, left = row0 + i * slice_rows, col0 + j * slice_cols
                if left < self.m and left <= top + slice_rows - 1:
                    barrier.arrive_and_wait()  # the slice before has left shared memory
                    for atom in cutlass.range_constexpr(atoms):
                        at = ((None, j * atoms + atom), i, 0)
                        cute.copy(copy_direct, from_direct[at], to_direct[(None, 0, atom)])
                        cute.copy(copy_mirror, from_mirror[at], to_mirror[(None, 0, atom)])
                    barrier.arrive_and_wait()
                    self._leave(False, direct, d, batch, top, left, thread)
                    self._leave(True, mirror, d, batch, top, left, thread)

    @cute.jit
    def _copy(self, transposed: cutlass.Constexpr[bool], tiled_mma):
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transposed, 4), self.out_dtype)
        return cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(atom, tiled_mma))

    @cute.jit
    def _register_copy(self, transposed: cutlass.Constexpr[bool], tiled_mma, registers, buffer, thread):
        """The thread's part of the buffer (atom, rows, columns) and its registers ((atom, columns), rows, 1)."""
        copy = self._copy(transposed, tiled_mma)
        return copy.get_slice(thread).partition_D(buffer), copy.retile(registers)

    @cute.jit
    def _leave(self, mirrored: cutlass.Constexpr[bool], buffer, d, batch, top, left, thread):
        """Store the slice's elements of the lower triangle in place (r ≥ c), or at their mirror places (r > c)."""
        width, across = self.vector, EPILOGUE_COLS if not mirrored else self.epilogue_rows
        along = self.epilogue_rows if not mirrored else EPILOGUE_COLS
        source = cute.make_tensor(
            buffer.iterator, cute.make_layout((width, across // width, along), stride=(1, width, across + PAD))
        )
        target = cute.make_tensor(
            d.iterator,
            cute.make_layout(
                (width, self.m // width, self.m, self.batch), stride=(1, width, self.m, self.m * self.m)
            ),
        )
        row0, col0 = (left, top) if mirrored else (top, left)
        steps = across // width * along // self.consumers
        if left + EPILOGUE_COLS <= top:  # the slice lies below the diagonal
            for step in cutlass.range(steps, unroll=4):
                self._leave_vector(mirrored, False, source, target, batch, row0, col0, thread + step * self.consumers)
        else:
            for step in cutlass.range(steps, unroll=1):
                self._leave_vector(mirrored, True, source, target, batch, row0, col0, thread + step * self.consumers)

    @cute.jit
    def _leave_vector(
        self,
        mirrored: cutlass.Constexpr[bool],
        diagonal: cutlass.Constexpr[bool],
        source,
        target,
        batch,
        row0,
        col0,
        place,
    ):
        """One aligned vector of a line; on the diagonal those of its elements that this copy owns."""
        width, parts = self.vector, cute.size(source, mode=[1])
        line = place // parts
        part = place - line * parts
        row, col = row0 + line, col0 + part * width
        held = cute.make_rmem_tensor(width, self.out_dtype)
        if row < self.m and col < self.m:
            to = target[(None, col // width, row, Int64(batch))]
            # Mirrored lines hold columns of the tile, so their far side is beyond the diagonal.
            if cutlass.const_expr(not diagonal):
                cute.autovec_copy(source[(None, part, line)], held)
                cute.autovec_copy(held, to)
            elif (col > row) if mirrored else (col + width - 1 <= row):
                cute.autovec_copy(source[(None, part, line)], held)
                cute.autovec_copy(held, to)
            elif (col + width - 1 > row) if mirrored else (col <= row):
                cute.autovec_copy(source[(None, part, line)], held)
                for e in cutlass.range(width, unroll_full=True):
                    if (col + e > row) if mirrored else (col + e <= row):
                        to[e] = held[e]
