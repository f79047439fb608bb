# mypy: ignore-errors
"""Epilogue of the CuTe DSL ``apply``: α, β·X or the weight's update in fp32, through shared memory to memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from dmuon_tune.problem import Problem

from ._cutedsl_apply_space import (
    STAGED_BUFFERS,
    STAGED_BYTES,
    STAGED_ROWS,
    TILE_K,
    WARPGROUPS,
    ApplyConfig,
    result_shape,
    rows_per_warpgroup,
)

DTYPES = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16, "float32": Float32}
PIECE = 64  # columns of the tile finished at a time: 32 accumulators a thread
LINE_BYTES = 128  # of a cache
VECTOR = 4  # elements of a weight that a thread updates at once: 16 bytes of the fp32 product


class ApplyEpilogue:
    """Finishes a warpgroup's rows of a tile in pieces of 64×64; warpgroups need not wait for each other."""

    def __init__(self, problem: Problem, config: ApplyConfig) -> None:
        self.batch, (self.rows, self.cols) = problem.batch, result_shape(problem)
        self.dtype, self.out_dtype = DTYPES[problem.dtype], DTYPES[problem.out_dtype]
        self.has_x, self.updates = problem.has_c, problem.epilogue == "w"
        self.tile = (config.tile_m, config.tile_n)
        self.pingpong = config.schedule == "pingpong"
        self.blocks_m = rows_per_warpgroup(config) // 64  # 64-row blocks of a warpgroup
        # The weight is rounded once, so its update is staged in fp32.
        self.staged_dtype = Float32 if self.updates else self.out_dtype
        self.staged_cols = STAGED_BYTES * 8 // self.staged_dtype.width

    def staged_layout(self):
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.staged_dtype)
        return cute.tile_to_shape(
            atom, (STAGED_ROWS, self.staged_cols, WARPGROUPS * STAGED_BUFFERS), order=(0, 1, 2)
        )

    @cute.jit
    def _piece_copy(self, cols: cutlass.Constexpr[int], atom, lane):
        """A thread's copy between its accumulators of a 64×cols piece and shared memory."""
        mode = LayoutEnum.ROW_MAJOR.sm90_mma_major_mode()
        mma = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, mode, mode, Float32, (1, 1, 1), tiler_mn=(64, cols)
        )
        return cute.make_tiled_copy_C(atom, mma).get_slice(lane), mma.partition_shape_C((64, cols))

    @cute.jit
    def finish(self, acc, ring, read, sx, staged, store, alpha, beta, batch, row0, col0, group, lane):
        """α, β·X and the store of a tile's accumulators; returns the ring's state."""
        pieces, parts = self.tile[1] // PIECE, PIECE // self.staged_cols
        value = cute.make_rmem_tensor(PIECE // 2, Float32)
        for piece in cutlass.range_constexpr(pieces):
            if cutlass.const_expr(self.has_x and not self.pingpong):
                ring.consumer_wait(read)
            for block in cutlass.range_constexpr(self.blocks_m):
                turn = (piece * self.blocks_m + block) * parts
                place = self._place(block, group)
                value.store(self._values(acc, piece, block).load() * alpha)
                if cutlass.const_expr(self.has_x):
                    self._add_x(value, sx, read.index, place, beta, lane)
                for part in cutlass.range_constexpr(parts):
                    at = (row0 // 64 + place, (col0 + piece * PIECE) // self.staged_cols + part, batch)
                    self._store(value, part, staged, turn + part, store, at, group, lane)
            if cutlass.const_expr(self.has_x):
                cute.arch.sync_warp()
                ring.consumer_release(read)
                read.advance()
        return read

    @cute.jit
    def update(self, acc, staged, w, rates, alpha, batch, row0, col0, group, lane):
        """W ← decay·W − rate·α·acc for a tile; the next part's weights are read while this one's are updated."""
        pieces, parts = self.tile[1] // PIECE, PIECE // self.staged_cols
        weight, decay, rate = self._weight(w[batch]), rates[batch, 0], alpha * rates[batch, 1]
        count = pieces * self.blocks_m * parts
        held = self._read(weight, row0, col0, 0, group, lane)
        for turn in cutlass.range_constexpr(count):
            following = self._read(weight, row0, col0, min(turn + 1, count - 1), group, lane)
            piece, block, part = turn // parts // self.blocks_m, turn // parts % self.blocks_m, turn % parts
            buffer = staged[(None, None, group * STAGED_BUFFERS + turn % STAGED_BUFFERS)]
            self._stage(self._values(acc, piece, block), part, buffer, lane)
            self._meet(group)  # everyone has read the other buffer: one meeting a part is enough
            self._write(weight, held, buffer, decay, rate, row0, col0, turn, group, lane)
            held = following

    def _values(self, acc, piece: int, block: int):
        """The accumulators of a piece."""
        start = block * self.tile[1] // 2 + piece * PIECE // 2
        return cute.make_tensor(acc.iterator + start, cute.make_layout(PIECE // 2))

    def _place(self, block: int, group):
        """Which of the tile's 64-row blocks it is."""
        return block if self.pingpong else WARPGROUPS * block + group

    @cute.jit
    def _add_x(self, value, sx, stage, place, beta, lane):
        """value ← value + β·X, X's 64×64 piece in the ring."""
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype)
        copy, shape = self._piece_copy(TILE_K, atom, lane)
        held = cute.make_rmem_tensor(shape, self.dtype)
        piece = cute.local_tile(sx[(None, None, stage)], (64, TILE_K), (place, 0))
        cute.copy(copy, copy.partition_S(piece), copy.retile(held))
        flat = cute.make_tensor(held.iterator, cute.make_layout(PIECE // 2))
        value.store(value.load() + beta * flat.load().to(Float32))

    @cute.jit
    def _stage(self, value, part: cutlass.Constexpr[int], buffer, lane):
        """A part of the piece, rounded, into shared memory."""
        count = self.staged_cols // 2
        if cutlass.const_expr(self.staged_dtype.width == 16):
            atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.staged_dtype)
        else:
            atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.staged_dtype, num_bits_per_copy=64)
        copy, shape = self._piece_copy(self.staged_cols, atom, lane)
        rounded = cute.make_rmem_tensor(shape, self.staged_dtype)
        flat = cute.make_tensor(rounded.iterator, cute.make_layout(count))
        taken = cute.make_tensor(value.iterator + part * count, cute.make_layout(count))
        flat.store(taken.load().to(self.staged_dtype))
        cute.copy(copy, copy.retile(rounded), copy.partition_D(buffer))

    @cute.jit
    def _store(self, value, part: cutlass.Constexpr[int], staged, turn: cutlass.Constexpr[int], store, at, group, lane):
        """A part of the piece to the result by TMA, which leaves out what lies beyond the matrix."""
        atom, tiles = store
        slot = group * STAGED_BUFFERS + turn % STAGED_BUFFERS
        first_warp = cute.arch.make_warp_uniform(lane // 32) == 0
        if first_warp:  # a tile's first piece finds the last one's stores long done
            cute.arch.cp_async_bulk_wait_group(0 if turn == 0 else STAGED_BUFFERS - 1, read=True)
        self._meet(group)
        buffer = staged[(None, None, slot)]
        self._stage(value, part, buffer, lane)
        cute.arch.fence_view_async_shared()
        self._meet(group)
        if first_warp:
            source, target = cute.nvgpu.cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(buffer, 0, 2), cute.group_modes(tiles, 0, 2)
            )
            cute.copy(atom, source, target[(None, *at)])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def prefetch(self, w, batch, row0, col0, group, lane):
        """Bring a warpgroup's part of the weight to the L2 cache, to be there when the product is done."""
        weight = self._weight(w[batch])
        per_line = LINE_BYTES * 8 // self.out_dtype.width // VECTOR  # vectors
        across = self.tile[1] // VECTOR // per_line
        for step in cutlass.range(-(-64 * self.blocks_m * across // 128), unroll=1):
            line = (step * 128 + lane) // across
            row = cutlass.min(row0 + self._place(line // 64, group) * 64 + line % 64, self.rows - 1)
            vector = cutlass.min(col0 // VECTOR + lane % across * per_line, self.cols // VECTOR - 1)
            cute.arch.prefetch(weight[(None, vector, row)].iterator.llvm_ptr, cache_level="L2")

    @cute.jit
    def _weight(self, address):
        """A weight in vectors: (element, vector of a row, row)."""
        return cute.make_tensor(
            cute.make_ptr(self.out_dtype, address, cute.AddressSpace.gmem, assumed_align=16),
            cute.make_layout((VECTOR, self.cols // VECTOR, self.rows), stride=(1, VECTOR, self.cols)),
        )

    @cute.jit
    def _vectors(self, row0, col0, turn: cutlass.Constexpr[int], group, lane):
        """A thread's first row and its vector in a part of the tile, and the rows that a warpgroup touches at once."""
        parts, across = PIECE // self.staged_cols, self.staged_cols // VECTOR
        piece, block, part = turn // parts // self.blocks_m, turn // parts % self.blocks_m, turn % parts
        row = row0 + self._place(block, group) * 64 + lane // across
        vector = (col0 + piece * PIECE + part * self.staged_cols) // VECTOR + lane % across
        return row, vector, 128 // across

    @cute.jit
    def _read(self, weight, row0, col0, turn: cutlass.Constexpr[int], group, lane):
        row, vector, together = self._vectors(row0, col0, turn, group, lane)
        held = cute.make_rmem_tensor((VECTOR, STAGED_ROWS // together), self.out_dtype)
        for step in cutlass.range_constexpr(STAGED_ROWS // together):
            # Threads outside the matrix read its edge, and store nothing.
            inside_row = cutlass.min(row + step * together, self.rows - 1)
            inside_vector = cutlass.min(vector, self.cols // VECTOR - 1)
            cute.autovec_copy(weight[(None, inside_vector, inside_row)], held[(None, step)])
        return held

    @cute.jit
    def _write(self, weight, held, buffer, decay, rate, row0, col0, turn: cutlass.Constexpr[int], group, lane):
        row, vector, together = self._vectors(row0, col0, turn, group, lane)
        across = self.staged_cols // VECTOR
        product = cute.make_rmem_tensor(VECTOR, Float32)
        result = cute.make_rmem_tensor(VECTOR, self.out_dtype)
        for step in cutlass.range_constexpr(STAGED_ROWS // together):
            place = cute.local_tile(buffer, (1, VECTOR), (step * together + lane // across, lane % across))
            cute.autovec_copy(place[(0, None)], product)
            updated = decay * held[(None, step)].load().to(Float32) - rate * product.load()
            result.store(updated.to(self.out_dtype))
            if row + step * together < self.rows and vector < self.cols // VECTOR:
                cute.autovec_copy(result, weight[(None, vector, row + step * together)])

    @cute.jit
    def _meet(self, group):
        """A barrier of one warpgroup."""
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
