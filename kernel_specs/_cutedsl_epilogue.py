# mypy: ignore-errors
"""Epilogue of the CuTe DSL symmetric product: α, β·C and γ·I in fp32, then chunks and their mirror images to memory."""

from __future__ import annotations

from math import gcd

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass.cute.nvgpu import cpasync, warp

from dmuon_tune.problem import Problem

from ._cutedsl_space import CHUNK, SymmetricConfig, tile_warpgroups

DTYPES = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}
VALUES = CHUNK * CHUNK // 128  # of a chunk, a thread
FIRST_BARRIER = 1  # named barriers of up to three warpgroups; 0 is the whole block's


class SymmetricEpilogue:
    """Stores a tile chunk by chunk: those below the diagonal in place and mirrored, those on it merged, each once.

    A warpgroup owns ``buffers`` pairs of chunks in shared memory. C comes by TMA into the first of a pair, the result
    takes its place, its mirror image the second's, and both leave by TMA. Where rows of the matrix are no whole 16
    bytes, threads store instead.
    """

    def __init__(self, problem: Problem, config: SymmetricConfig) -> None:
        self.batch, self.m = problem.batch, problem.m
        self.dtype, self.out_dtype = DTYPES[problem.dtype], DTYPES[problem.out_dtype]
        self.has_c, self.has_identity = problem.has_c, problem.has_identity
        self.tile = (config.tile_m, config.tile_n)
        self.warpgroups, self.tile_warpgroups = config.warpgroups, tile_warpgroups(config)
        self.pingpong, self.split, self.buffers = config.pingpong, config.split, config.buffers
        self.slots = 2 * config.warpgroups * config.buffers
        self.tma_rows = problem.m % 8 == 0
        self.chunk_cols = config.tile_n // CHUNK
        self.chunks = config.tile_m // CHUNK // self.tile_warpgroups * self.chunk_cols  # of one warpgroup

    @cute.jit
    def place(self, at: cutlass.Constexpr[int], row, col, group):
        """Top and left of a warpgroup's chunk ``at`` of a tile."""
        strip = 0 if cutlass.const_expr(self.pingpong) else group
        i, j = at // self.chunk_cols, at % self.chunk_cols
        return row * self.tile[0] + (i * self.tile_warpgroups + strip) * CHUNK, col * self.tile[1] + j * CHUNK

    @cute.jit
    def stored(self, top, left):
        """Whether a chunk touches the lower triangle and the matrix."""
        return left <= top and top < self.m

    def chunk(self, at: int, group):
        """A chunk's number in its tile."""
        return at if self.pingpong else group * self.chunks + at

    @cute.jit
    def owned(self, at: cutlass.Constexpr[int], group, rank, shares_k):
        """Whether this block stores the chunk: one of those that share the tile's k does."""
        if cutlass.const_expr(self.split == 1):
            return True
        return not shares_k or self.chunk(at, group) % self.split == rank

    @cute.jit
    def load_c(self, c_atom, c_tma, c_smem, barriers, group, rank, shares_k, row, col, batch, count):
        """The warp that feeds one warpgroup: C's chunks of a tile in the order that they are stored in."""
        tiles = cute.local_tile(c_tma, (CHUNK, CHUNK), (None, None, None))
        to, source = _partition(c_atom, c_smem, tiles)
        for at in cutlass.range_constexpr(self.chunks):
            top, left = self.place(at, row, col, group)
            if self.stored(top, left) and self.owned(at, group, rank, shares_k):
                buffer = group * self.buffers + count % self.buffers
                full, empty = barriers + buffer, barriers + (self.slots // 2 + buffer)
                cute.arch.mbarrier_wait(empty, (count // self.buffers & 1) ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, CHUNK * CHUNK * 2)
                place = (None, top // CHUNK, left // CHUNK, batch)
                cute.copy(c_atom, source[place], to[(None, 2 * buffer)], tma_bar_ptr=full)
                count += 1
        return count

    @cute.jit
    def store(
        self, acc, chunk_mma, shared, d_atom, d_tma, d, scalars, group, rank, shares_k, row, col, batch, count, thread
    ):
        """A warpgroup's part of a tile; ``count`` chunks went before. ``thread`` counts within the warpgroup."""
        first = count
        for at in cutlass.range_constexpr(self.chunks):
            top, left = self.place(at, row, col, group)
            if self.stored(top, left) and self.owned(at, group, rank, shares_k):
                values = cute.make_tensor(acc.iterator + at * VALUES, cute.make_layout(((2, 2, CHUNK // 8), 1, 1)))
                buffer = group * self.buffers + count % self.buffers
                phase = count // self.buffers & 1
                self._store_chunk(
                    values, chunk_mma, shared, d_atom, d_tma, d, scalars, group, buffer, phase, top, left, batch,
                    thread,
                )
                late = self.buffers - 1
                if cutlass.const_expr(self.has_c):
                    if count - first >= late:
                        self._release(shared, group, count - late, late, thread)
                count += 1
        if cutlass.const_expr(self.has_c and self.buffers > 1):
            if count > first:
                self._release(shared, group, count - 1, 0, thread)
        return count

    @cute.jit
    def _release(self, shared, group, count, later: cutlass.Constexpr[int], thread):
        """Once it has left, give chunk ``count``'s buffer back to C's loader; ``later`` ones may be leaving."""
        _, barriers = shared
        if thread // 32 == 0:
            cute.arch.cp_async_bulk_wait_group(later, read=True)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(
                    barriers + (self.slots // 2 + group * self.buffers + count % self.buffers)
                )

    @cute.jit
    def _store_chunk(
        self, acc, chunk_mma, shared, d_atom, d_tma, d, scalars, group, buffer, phase, top, left, batch, thread
    ):
        raw, _ = shared
        _, _, gamma = scalars
        leader = thread // 32 == 0
        coordinates = self._coordinates(chunk_mma, thread)
        self._scale(acc, shared, scalars, buffer, phase, thread)
        if cutlass.const_expr(self.has_identity):
            if top == left:
                self._add_identity(acc, coordinates, gamma)
        rounded = self._rounded(acc)
        if cutlass.const_expr(not self.has_c):
            if cutlass.const_expr(self.tma_rows):
                if leader:
                    cute.arch.cp_async_bulk_wait_group(self.buffers - 1, read=True)
            self._sync(group)  # the buffer's chunk before has left, as C's arrival says where there is one
        self._fill(rounded, chunk_mma, raw, group, buffer, top, left, thread)
        if cutlass.const_expr(self.tma_rows):
            cute.arch.fence_proxy("async.shared", space="cta")
            self._sync(group)
            if leader:
                self._leave(raw, d_atom, d_tma, buffer, top, left, batch)
        else:
            self._sync(group)
            self._write(raw, d, 2 * buffer, top, left, batch, thread)
            if top != left:
                self._write(raw, d, 2 * buffer + 1, left, top, batch, thread)

    @cute.jit
    def _scale(self, acc, shared, scalars, buffer, phase, thread):
        """acc ← α·acc + β·C, C taken from the chunk's buffer once it has come."""
        raw, barriers = shared
        alpha, beta, _ = scalars
        held = cute.make_rmem_tensor(acc.shape, self.dtype)
        if cutlass.const_expr(self.has_c):
            cute.arch.mbarrier_wait(barriers + buffer, phase)
            self._take_c(held, raw, 2 * buffer, thread)
        for v in cutlass.range_constexpr(VALUES):
            value = alpha * acc[v]
            if cutlass.const_expr(self.has_c):
                value = value + beta * held[v].to(Float32)
            acc[v] = value

    def _coordinates(self, chunk_mma, thread):
        """Row and column in a chunk of each of a thread's values."""
        return chunk_mma.get_slice(thread).partition_C(cute.make_identity_tensor((CHUNK, CHUNK)))

    @cute.jit
    def _add_identity(self, acc, coordinates, gamma):
        """acc ← acc + γ·I, in a chunk on the diagonal."""
        for v in cutlass.range_constexpr(VALUES):
            acc[v] = acc[v] + (gamma if coordinates[v][0] == coordinates[v][1] else Float32(0.0))

    def _rounded(self, acc):
        """A chunk's values in D's dtype."""
        rounded = cute.make_rmem_tensor(acc.shape, self.out_dtype)
        rounded.store(acc.load().to(self.out_dtype))
        return rounded

    @cute.jit
    def _fill(self, rounded, chunk_mma, raw, group, buffer, top, left, thread):
        """A chunk into its buffer, its mirror image into the one beside; on the diagonal the two are merged."""
        for transposed in cutlass.range_constexpr(2):
            atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transposed == 1, 4), self.out_dtype)
            write = cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(atom, chunk_mma))
            to = write.get_slice(thread).partition_D(self._chunks(raw, self.out_dtype, transposed == 1))
            source = write.retile(rounded)
            for part in cutlass.range_constexpr(cute.size(to, mode=[2])):
                cute.copy(write, source[((None, part), 0, 0)], to[(None, 0, part, 2 * buffer + transposed)])
        if top == left:
            self._sync(group)
            self._merge(raw, buffer, thread)

    def _sync(self, group):
        """All threads of one warpgroup."""
        cute.arch.barrier(barrier_id=FIRST_BARRIER + group, number_of_threads=128)

    def _chunks(self, raw, dtype, transposed: bool):
        """All chunk buffers, indexed (row, column, slot); transposed ones hold columns as lines."""
        strides = (1, CHUNK, CHUNK * CHUNK) if transposed else (CHUNK, 1, CHUNK * CHUNK)
        pointer = cute.recast_ptr(raw, self.swizzle, dtype)
        return cute.make_tensor(pointer, cute.make_layout((CHUNK, CHUNK, self.slots), stride=strides))

    def _lines(self, raw, width: int):
        """All chunk buffers unswizzled: (element, part of a 16-byte unit, unit, line, slot)."""
        layout = cute.make_layout(
            (width, 8 // width, CHUNK // 8, CHUNK, self.slots), stride=(1, width, 8, CHUNK, CHUNK * CHUNK)
        )
        return cute.make_tensor(raw, layout)

    @cute.jit
    def _take_c(self, held, raw, slot, thread):
        """A thread's pairs of C, as wgmma spreads them; the swizzle keeps a warp's eight rows in different banks."""
        pairs = self._lines(cute.recast_ptr(raw, dtype=self.dtype), 2)
        line, pair = thread // 32 * 16 + thread % 32 // 4, thread % 4
        for v in cutlass.range_constexpr(VALUES // 2):
            unit = v // 2 ^ (line & 7)
            source = pairs[(None, pair, unit, line + v % 2 * 8, slot)]
            cute.autovec_copy(source, cute.make_tensor(held.iterator + 2 * v, cute.make_layout(2)))

    @cute.jit
    def _merge(self, raw, buffer, thread):
        """A chunk on the diagonal: above it goes what the mirror image has there."""
        lines = self._lines(raw, 8)
        lower, upper = cute.make_rmem_tensor(8, self.out_dtype), cute.make_rmem_tensor(8, self.out_dtype)
        for step in cutlass.range_constexpr(CHUNK * CHUNK // 8 // 128):
            place = thread + step * 128
            line, unit = place // 8, place % 8
            swizzled = unit ^ (line & 7)
            cute.autovec_copy(lines[(None, 0, swizzled, line, 2 * buffer)], lower)
            cute.autovec_copy(lines[(None, 0, swizzled, line, 2 * buffer + 1)], upper)
            for e in cutlass.range_constexpr(8):
                lower[e] = lower[e] if unit * 8 + e <= line else upper[e]
            cute.autovec_copy(lower, lines[(None, 0, swizzled, line, 2 * buffer)])

    @cute.jit
    def _leave(self, raw, d_atom, d_tma, buffer, top, left, batch):
        """By TMA, which leaves out what lies beyond the matrix."""
        tiles = cute.local_tile(d_tma, (CHUNK, CHUNK), (None, None, None))
        source, to = _partition(d_atom, self._chunks(raw, self.out_dtype, False), tiles)
        row, col = top // CHUNK, left // CHUNK
        with cute.arch.elect_one():
            cute.copy(d_atom, source[(None, 2 * buffer)], to[(None, row, col, batch)])
            if row != col:
                cute.copy(d_atom, source[(None, 2 * buffer + 1)], to[(None, col, row, batch)])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def _write(self, raw, d, slot, row0, col0, batch, thread):
        """By threads, ``width`` elements at a time."""
        width = gcd(self.m, 8)
        lines = self._lines(raw, width)
        layout = cute.make_layout(
            (width, self.m // width, self.m, self.batch), stride=(1, width, self.m, self.m * self.m)
        )
        target = cute.make_tensor(d.iterator, layout)
        held = cute.make_rmem_tensor(width, self.out_dtype)
        parts = CHUNK // width
        for step in cutlass.range(CHUNK * parts // 128, unroll=4):
            place = thread + step * 128
            line, part = place // parts, place % parts
            row, col = row0 + line, col0 // width + part
            unit = part // (8 // width)
            if row < self.m and col < self.m // width:
                cute.autovec_copy(lines[(None, part % (8 // width), unit ^ (line & 7), line, slot)], held)
                cute.autovec_copy(held, target[(None, col, row, Int64(batch))])


def _partition(atom, chunks, tiles):
    """Shared and global side of a TMA copy of single chunks."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(chunks, 0, 2), cute.group_modes(tiles, 0, 2)
    )
