# mypy: ignore-errors
"""Between device memory and the CuTe DSL kernel of whole recurrences: the norm, X into shared memory, Y out of it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from dmuon_tune.problem import Problem

from . import _cutedsl_polar_ops as ops
from ._cutedsl_polar_space import CHUNK, HALF, POLAR_THREADS, PolarConfig, chunks, halves
from .polar_small import input_scale

DTYPES = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16, "float32": cutlass.Float32}
PANEL = 64  # fp16 columns of a 128-byte swizzled line; a half matrix is stored panel after panel
PANEL_BYTES = HALF * PANEL * 2
VECTOR = 8  # elements a thread reads or writes at once in device memory
# The sum of squares is taken of u, and where it comes out of range of u·2^-80 or u·2^80: for any finite norm one of
# them neither overflows nor loses bits.
LOW, HIGH = 2.0**-80, 2.0**80
SAFE_LOW, SAFE_HIGH = 2.0**-90, 2.0**120
TRIALS = 2


class PolarMemory:
    """Loads and stores a block's rows. A thread's vectors of eight elements lie along the contiguous axis.

    They are one below the other, ``row_step`` rows apart, so that one swizzled address serves them all.
    """

    def __init__(self, problem: Problem, config: PolarConfig) -> None:
        self.batch, self.m, self.n = problem.batch, problem.m, problem.n
        self.row_major = problem.layout == "row"
        self.stored = (self.m, self.n) if self.row_major else (self.n, self.m)  # lines and their length
        self.dtype, self.out_dtype = DTYPES[problem.dtype], DTYPES[problem.out_dtype]
        self.scale = input_scale(problem.m)
        self.halves, self.chunks = halves(problem), chunks(problem, config)
        self.groups = config.column_groups
        self.blocks = self.halves * self.groups  # a matrix's cluster: rank = half + halves · column group
        self.cols = self.chunks * CHUNK
        self.vectors = HALF * self.cols // VECTOR // POLAR_THREADS
        self.row_step = HALF // self.vectors

    @cute.jit
    def _meet(self):
        """All threads of the matrix's blocks; what each wrote before, even to the other's memory, is seen after."""
        if cutlass.const_expr(self.blocks > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def _first(self, thread):
        """(row of the half, column) where a thread's first vector begins; the next is ``row_step`` rows further.

        Lanes take neighbouring vectors of a row, in col layout neighbouring columns, whose vectors hold eight rows.
        """
        if cutlass.const_expr(self.row_major):
            row = thread // (self.cols // VECTOR)
            return row, (thread - row * (self.cols // VECTOR)) * VECTOR
        part = thread // self.cols
        return part * VECTOR, thread - part * self.cols

    @cute.jit
    def _corner(self, rank):
        """The first row and column of the matrix that a block owns."""
        return rank % self.halves * HALF, rank // self.halves * self.cols

    @cute.jit
    def _lines(self, base, row, col):
        """Where the vector is in the swizzled X: one address in row layout, one for each of its rows in col layout."""
        start = base + col // PANEL * PANEL_BYTES + row * (PANEL * 2) + col % VECTOR * 2
        part = col % PANEL // VECTOR
        if cutlass.const_expr(self.row_major):
            return (start + (part ^ (row % 8)) * 16,)
        return tuple(start + e * (PANEL * 2) + (part ^ e) * 16 for e in range(VECTOR))

    @cute.jit
    def _view(self, tensor, width: cutlass.Constexpr[int]):
        """(element, vector, line, matrix) of a tensor in device memory."""
        lines, length = self.stored
        layout = cute.make_layout(
            (width, length // width, lines, self.batch), stride=(1, width, length, lines * length)
        )
        return cute.make_tensor(tensor.iterator, layout)

    @cute.jit
    def _read(self, u, held, index, row, col):
        """Eight elements from (row, col) on, zeros outside the matrix."""
        line, at = (row, col) if self.row_major else (col, row)
        lines, length = self.stored
        held.fill(0.0)
        if cutlass.const_expr(length % VECTOR == 0):
            if line < lines and at < length:
                cute.autovec_copy(self._view(u, VECTOR)[(None, at // VECTOR, line, Int64(index))], held)
        else:
            view = self._view(u, 1)
            for e in cutlass.range_constexpr(VECTOR):
                if line < lines and at + e < length:
                    held[e] = view[0, at + e, line, Int64(index)]

    @cute.jit
    def _write(self, y, held, index, row, col):
        line, at = (row, col) if self.row_major else (col, row)
        lines, length = self.stored
        if cutlass.const_expr(length % VECTOR == 0):
            if line < lines and at < length:
                cute.autovec_copy(held, self._view(y, VECTOR)[(None, at // VECTOR, line, Int64(index))])
        else:
            view = self._view(y, 1)
            for e in cutlass.range_constexpr(VECTOR):
                if line < lines and at + e < length:
                    view[0, at + e, line, Int64(index)] = held[e]

    @cute.jit
    def _load(self, u, norm_factor, x_own, sums, partial, index, rank, thread):
        """The block's rows of scale · U / (norm_factor · ‖U‖_F), rounded to fp16, into shared memory."""
        row, col = self._first(thread)
        top, left = self._corner(rank)
        raw = cute.make_rmem_tensor((VECTOR, self.vectors), self.dtype)
        for i in cutlass.range_constexpr(self.vectors):
            self._read(u, raw[(None, i)], index, top + row + i * self.row_step, left + col)
        prescale = Float32(1.0)
        square = self._square(raw, prescale, 0, sums, partial, rank, thread)
        in_range = (square >= Float32(SAFE_LOW)) & (square <= Float32(SAFE_HIGH))
        if not in_range:
            prescale = Float32(HIGH) if square < Float32(SAFE_LOW) else Float32(LOW)
            square = self._square(raw, prescale, 1, sums, partial, rank, thread)
        factor = self._factor(norm_factor, square)
        lines = self._lines(x_own.iterator.toint(), row, col)
        for i in cutlass.range_constexpr(self.vectors):
            words = []
            for e in cutlass.range_constexpr(0, VECTOR, 2):
                pair = [raw[e + k, i].to(Float32) * prescale * factor for k in range(2)]
                words.append(ops.pack(pair[0], pair[1]))
            offset = i * self.row_step * PANEL * 2
            if cutlass.const_expr(self.row_major):
                ops.store_words(lines[0] + offset, words[0], words[1], words[2], words[3])
            else:
                for e in cutlass.range_constexpr(VECTOR):
                    word = words[e // 2] if e % 2 == 0 else words[e // 2] >> 16
                    ops.store_half(lines[e] + offset, word)
        # A warpgroup's rows are written by all threads, and sent by it.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()

    @cute.jit
    def _square(self, raw, prescale, trial: cutlass.Constexpr[int], sums, partial, rank, thread):
        """‖prescale · U‖_F², summed in a fixed order over the thread's values, its warp, the block and its cluster."""
        chains = [Float32(0.0) for _ in range(4)]  # independent sums: one would wait for each addition
        for i in cutlass.range_constexpr(self.vectors):
            for e in cutlass.range_constexpr(VECTOR):
                value = raw[e, i].to(Float32) * prescale
                chains[e % 4] = chains[e % 4] + value * value
        total = (chains[0] + chains[1]) + (chains[2] + chains[3])
        total = cute.arch.warp_reduction_sum(total)
        if thread % 32 == 0:
            partial[trial, thread // 32] = total
        cute.arch.sync_threads()
        if thread == 0:
            total = Float32(0.0)
            for warp in cutlass.range_constexpr(POLAR_THREADS // 32):
                total += partial[trial, warp]
            sums[trial, rank] = total
            slot = sums.iterator + (rank * TRIALS + trial)
            for away in cutlass.range_constexpr(1, self.blocks):
                to = (rank + away) % self.blocks
                ops.store_remote(cute.arch.map_dsmem_ptr(slot, to).toint(), total)
        self._meet()
        total = Float32(0.0)
        for block in cutlass.range_constexpr(self.blocks):
            total += sums[trial, block]
        return total

    @cute.jit
    def _factor(self, norm_factor, square):
        """What the prescaled U is multiplied by; zero for a zero matrix, NaN where the norm is not finite."""
        factor = Float32(self.scale) / (norm_factor * cute.math.sqrt(square))
        if square == Float32(0.0):
            factor = Float32(0.0)
        if square == Float32(float("inf")):
            factor = Float32(float("nan"))
        return factor

    @cute.jit
    def _store(self, y, x_own, index, rank, thread):
        row, col = self._first(thread)
        top, left = self._corner(rank)
        lines = self._lines(x_own.iterator.toint(), row, col)
        out = cute.make_rmem_tensor(VECTOR, self.out_dtype)
        back = Float32(1.0 / self.scale)
        # All reads first: each waits for shared memory.
        values = []
        for i in cutlass.range_constexpr(self.vectors):
            offset = i * self.row_step * PANEL * 2
            if cutlass.const_expr(self.row_major):
                values.append(ops.load_words(lines[0] + offset))
            else:
                values.append(tuple(ops.load_half(lines[e] + offset) for e in range(VECTOR)))
        for i in cutlass.range_constexpr(self.vectors):
            for e in cutlass.range_constexpr(0, VECTOR, 2):
                if cutlass.const_expr(self.row_major):
                    even, odd = ops.unpack(values[i][e // 2])
                else:
                    even, odd = values[i][e], values[i][e + 1]
                out[e] = (even * back).to(self.out_dtype)
                out[e + 1] = (odd * back).to(self.out_dtype)
            self._write(y, out, index, top + row + i * self.row_step, left + col)
