# mypy: ignore-errors
"""Kernel body of the whole Newton–Schulz recurrence of small matrices for sm_90a in CuTe DSL: one cluster a matrix."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import SmemAllocator
from cutlass.utils import hopper_helpers as hopper

from dmuon_tune.problem import Problem

from ._cutedsl_polar_ops import (
    load_half, load_squares, load_words, pack, send, store_half, store_remote, store_squares, store_words, unpack,
)
from ._cutedsl_polar_space import CHUNK, HALF, POLAR_THREADS, PolarConfig, chunks, halves, smem_bytes
from .polar_small import internal_scale, schedule

DTYPES = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16, "float32": cutlass.Float32}
PANEL = 64  # fp16 columns of a 128-byte swizzled line; a half matrix is stored panel after panel
PANEL_BYTES = HALF * PANEL * 2
CHUNK_BYTES = HALF * CHUNK * 2
GROUP_BYTES = 64 * PANEL * 2  # of one panel, what one warpgroup's rows occupy: contiguous
WORDS = CHUNK // 16 * 4  # registers of 64 rows × 128 columns in fp16
VECTOR = 8  # elements a thread reads or writes at once in device memory
# Sums of squares of u·2^-80, u and u·2^80: for any finite norm one of them neither overflows nor loses bits.
LOW, HIGH = 2.0**-80, 2.0**80
SAFE_LOW, SAFE_HIGH = 2.0**-90, 2.0**120
EXCHANGE = 4  # floats a block shares of its sums


class Program:
    """What the backend compiles: the entry point and stand-ins for its arguments but the stream."""

    def __init__(self, problem: Problem, config: PolarConfig, sm_count: int) -> None:
        self.problem, self.smem_bytes = problem, smem_bytes(problem)
        self.entry = SmallPolar(problem, sm_count).launch

    def arguments(self) -> tuple:
        problem = self.problem
        inner = (problem.m, problem.n) if problem.layout == "row" else (problem.n, problem.m)
        shape = (problem.batch, *inner)
        coefficients = (schedule(problem)[0], 3)
        return (
            _tensor(problem.dtype, shape), _tensor("float32", coefficients), _tensor(problem.out_dtype, shape),
            Float32(1.0),
        )


def _tensor(dtype: str, shape: tuple[int, ...]):
    order = tuple(reversed(range(len(shape))))
    align = 16 if len(shape) == 3 else 4
    return cute.runtime.make_fake_compact_tensor(DTYPES[dtype], shape, stride_order=order, assumed_align=align)


class SmallPolar:
    """X ← aX + (bA + cA²)X, A = XXᵀ, for matrices of at most 256 rows and columns, X held in shared memory.

    One block where m ≤ 128, else a cluster of two: a block owns 128 rows of X, of A and of P = bA + cA², two
    warpgroups of 64 rows each. Rows are numbered with the own half first, so both blocks run the same code.
    A block keeps all of X (own, other) and of A three quarters: its diagonal square, its rows of the square beside
    it (whose transpose is the one below: wgmma reads either order) and the other block's diagonal square.
    The own rows of A and P pass from accumulators to wgmma's A operand in registers. Per step the blocks exchange
    128 rows of X and one square of A, by bulk copies that count on the receiver's barrier; the products that need
    only own rows run meanwhile.
    """

    def __init__(self, problem: Problem, sm_count: int) -> None:
        self.batch, self.m, self.n = problem.batch, problem.m, problem.n
        self.row_major = problem.layout == "row"
        self.dtype, self.out_dtype = DTYPES[problem.dtype], DTYPES[problem.out_dtype]
        self.steps = schedule(problem)[0]
        self.scale = internal_scale(problem.m)
        self.halves, self.chunks = halves(problem), chunks(problem)
        self.cols = self.chunks * CHUNK
        self.k_blocks = -(-self.n // 16)
        self.vectors = HALF * self.cols // VECTOR // POLAR_THREADS
        self.row_step = HALF // self.vectors
        self.stored = (self.m, self.n) if self.row_major else (self.n, self.m)  # lines and their length
        self.clusters = min(self.batch, sm_count // self.halves)
        self.smem_bytes = smem_bytes(problem)

    @cute.jit
    def launch(
        self, u: cute.Tensor, coefficients: cute.Tensor, y: cute.Tensor, norm_factor: Float32, stream
    ):
        k_major, mn_major = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        rows = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float16)
        cols = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, Float16)
        x_layout = cute.tile_to_shape(rows, (HALF, self.cols), order=(0, 1))
        square_layout = cute.tile_to_shape(rows, (HALF, HALF), order=(0, 1))
        # The same bytes as a square, read as its transpose: (column, row).
        turned_layout = cute.tile_to_shape(cols, (HALF, HALF), order=(1, 0))
        shape = {"atom_layout_mnk": (2, 1, 1), "tiler_mn": (64, CHUNK)}
        memory, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        gram_mma = hopper.make_trivial_tiled_mma(
            Float16, Float16, k_major, k_major, Float32, a_source=memory, **shape
        )
        straight_mma = hopper.make_trivial_tiled_mma(
            Float16, Float16, k_major, k_major, Float32, a_source=registers, **shape
        )
        turned_mma = hopper.make_trivial_tiled_mma(
            Float16, Float16, k_major, mn_major, Float32, a_source=registers, **shape
        )
        self._kernel(
            u, coefficients, y, norm_factor, gram_mma, straight_mma, turned_mma, x_layout, square_layout, turned_layout
        ).launch(
            grid=[self.clusters * self.halves, 1, 1],
            block=[POLAR_THREADS, 1, 1],
            cluster=[self.halves, 1, 1],
            max_number_threads=[POLAR_THREADS, 1, 1],
            min_blocks_per_mp=1,
            smem=self.smem_bytes,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def _kernel(
        self,
        u: cute.Tensor,
        coefficients: cute.Tensor,
        y: cute.Tensor,
        norm_factor: Float32,
        gram_mma: cute.TiledMma,
        straight_mma: cute.TiledMma,
        turned_mma: cute.TiledMma,
        x_layout: cute.ComposedLayout,
        square_layout: cute.ComposedLayout,
        turned_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        rank = Int32(0)
        if cutlass.const_expr(self.halves == 2):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

        smem = SmemAllocator()
        x_own = self._matrix(smem, x_layout)
        x_other = self._matrix(smem, x_layout) if self.halves == 2 else None
        own = self._matrix(smem, square_layout)
        beside = self._matrix(smem, square_layout) if self.halves == 2 else None
        other = self._matrix(smem, square_layout) if self.halves == 2 else None
        sums = smem.allocate_tensor(Float32, cute.make_layout((EXCHANGE, 2)), byte_alignment=16)
        partial = smem.allocate_tensor(Float32, cute.make_layout((EXCHANGE, POLAR_THREADS // 32)), byte_alignment=16)
        barriers = smem.allocate_array(Int64, 2, byte_alignment=8)
        if cutlass.const_expr(self.halves == 2):
            if thread == 0:
                cute.arch.mbarrier_init(barriers, 1)
                cute.arch.mbarrier_init(barriers + 1, 1)
                cute.arch.mbarrier_init_fence()
            self._expect(barriers, thread)
            self._meet()
        # Launched while the previous kernel of the stream drains: no global memory before this point.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        group = cute.arch.make_warp_uniform(thread // 128)
        leader = Int32(thread % 128 == 0)
        places = self._places(thread)
        phase = Int32(0)
        index = block // self.halves
        while index < self.batch:
            self._load(u, norm_factor, x_own, sums, partial, index, rank, thread)
            for step in cutlass.range(self.steps, unroll=1):
                self._share(x_own, x_other, barriers, rank, group, leader, self.cols // PANEL)
                a, b, c = (coefficients[step, i] for i in range(3))
                b = b * Float32(self.scale**-2)
                c = c * Float32(self.scale**-4)
                first, second = self._gram(
                    gram_mma, x_own, x_other, own, beside, other, barriers, phase, rank, group, leader, places, thread
                )
                first, second = self._polynomial(
                    straight_mma, turned_mma, own, beside, other, turned_layout, first, second, barriers, phase, b, c,
                    places, thread,
                )
                self._apply(turned_mma, x_own, x_other, turned_layout, first, second, a, places)
                phase = phase ^ 1
            cute.arch.sync_threads()
            self._store(y, x_own, index, rank, thread)
            index += self.clusters

    @cute.jit
    def _matrix(self, smem, layout):
        return smem.allocate_tensor(Float16, layout.outer, byte_alignment=1024, swizzle=layout.inner)

    @cute.jit
    def _meet(self):
        """All threads of the matrix's blocks; what each wrote before, even to the other's memory, is seen after."""
        if cutlass.const_expr(self.halves == 2):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    # Device memory. A thread's vectors of eight elements lie along the contiguous axis, in one column of vectors.

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
        raw = cute.make_rmem_tensor((VECTOR, self.vectors), self.dtype)
        low, middle, high = Float32(0.0), Float32(0.0), Float32(0.0)
        for i in cutlass.range_constexpr(self.vectors):
            self._read(u, raw[(None, i)], index, rank * HALF + row + i * self.row_step, col)
        for i in cutlass.range_constexpr(self.vectors * VECTOR):
            value = raw[i].to(Float32)
            below, above = value * Float32(LOW), value * Float32(HIGH)
            low += below * below
            middle += value * value
            high += above * above
        prescale, factor = self._factor(norm_factor, low, middle, high, sums, partial, rank, thread)
        lines = self._lines(x_own.iterator.toint(), row, col)
        for i in cutlass.range_constexpr(self.vectors):
            words = []
            for e in cutlass.range_constexpr(0, VECTOR, 2):
                pair = [raw[e + k, i].to(Float32) * prescale * factor for k in range(2)]
                words.append(pack(pair[0], pair[1]))
            offset = i * self.row_step * PANEL * 2
            if cutlass.const_expr(self.row_major):
                store_words(lines[0] + offset, words[0], words[1], words[2], words[3])
            else:
                for e in cutlass.range_constexpr(VECTOR):
                    word = words[e // 2] if e % 2 == 0 else words[e // 2] >> 16
                    store_half(lines[e] + offset, word)
        # A warpgroup's rows are written by all threads, and sent by it.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()

    @cute.jit
    def _factor(self, norm_factor, low, middle, high, sums, partial, rank, thread):
        """(prescale, factor), whose product normalizes U; summed in a fixed order. NaN where the norm is not finite."""
        warp = thread // 32
        own = [cute.arch.warp_reduction_sum(value) for value in (low, middle, high)]
        if thread % 32 == 0:
            for i in cutlass.range_constexpr(3):
                partial[i, warp] = own[i]
        cute.arch.sync_threads()
        if thread < 3:
            total = Float32(0.0)
            for i in cutlass.range_constexpr(POLAR_THREADS // 32):
                total += partial[thread, i]
            sums[thread, rank] = total
            if cutlass.const_expr(self.halves == 2):
                slot = sums.iterator + (rank * EXCHANGE + thread)
                store_remote(cute.arch.map_dsmem_ptr(slot, 1 - rank).toint(), total)
        self._meet()
        low, middle, high = sums[0, 0], sums[1, 0], sums[2, 0]
        if cutlass.const_expr(self.halves == 2):
            low, middle, high = low + sums[0, 1], middle + sums[1, 1], high + sums[2, 1]
        prescale, square = Float32(1.0), middle
        if middle < Float32(SAFE_LOW):
            prescale, square = Float32(HIGH), high
        if middle > Float32(SAFE_HIGH):
            prescale, square = Float32(LOW), low
        factor = Float32(self.scale) / (norm_factor * cute.math.sqrt(square))
        if square == Float32(0.0):
            factor = Float32(0.0)
        if low == Float32(float("inf")):
            factor = Float32(float("nan"))
        return prescale, factor

    @cute.jit
    def _store(self, y, x_own, index, rank, thread):
        row, col = self._first(thread)
        lines = self._lines(x_own.iterator.toint(), row, col)
        out = cute.make_rmem_tensor(VECTOR, self.out_dtype)
        back = Float32(1.0 / self.scale)
        for i in cutlass.range_constexpr(self.vectors):
            offset = i * self.row_step * PANEL * 2
            if cutlass.const_expr(self.row_major):
                words = load_words(lines[0] + offset)
                for e in cutlass.range_constexpr(0, VECTOR, 2):
                    left, right = unpack(words[e // 2])
                    out[e] = (left * back).to(self.out_dtype)
                    out[e + 1] = (right * back).to(self.out_dtype)
            else:
                for e in cutlass.range_constexpr(VECTOR):
                    out[e] = (load_half(lines[e] + offset) * back).to(self.out_dtype)
            self._write(y, out, index, rank * HALF + row + i * self.row_step, col)

    # Between the blocks of a cluster.

    @cute.jit
    def _share(self, mine, theirs, barrier, rank, group, leader, panels: cutlass.Constexpr[int]):
        """Own rows, written by this block's threads, become visible to wgmma here and are sent to the other block."""
        cute.arch.fence_proxy("async.shared", space="cta")
        if cutlass.const_expr(self.halves == 2):
            cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
            done = cute.arch.map_dsmem_ptr(barrier, 1 - rank).toint()
            target = cute.arch.map_dsmem_ptr(theirs.iterator, 1 - rank).toint()
            for panel in cutlass.range_constexpr(panels):
                offset = panel * PANEL_BYTES + group * GROUP_BYTES
                send(target + offset, mine.iterator.toint() + offset, Int32(GROUP_BYTES), done, leader)

    @cute.jit
    def _expect(self, barriers, thread):
        """Set both barriers up for the next rows that come, once this thread has waited for the ones before."""
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barriers, HALF * self.cols * 2)
            cute.arch.mbarrier_arrive_and_expect_tx(barriers + 1, HALF * HALF * 2)

    # Products. A half's accumulator: 64 rows of a warpgroup × 128 columns, 64 values a thread.

    @cute.jit
    def _accumulator(self, mma):
        acc = cute.make_rmem_tensor(mma.partition_shape_C((HALF, CHUNK)), Float32)
        return acc

    @cute.jit
    def _operand_registers(self):
        """Room for 64 rows × 128 columns as wgmma wants an A operand, and the same as 32-bit words.

        Word by word it lies as an accumulator does. Kept in words: apart, its halves would take a register each.
        """
        operand = cute.make_rmem_tensor(cute.make_layout(((2, 2, 2), 1, CHUNK // 16)), Float16)
        return operand, self._words(operand)

    @cute.jit
    def _words(self, operand):
        return cute.make_tensor(cute.recast_ptr(operand.iterator, dtype=Int32), cute.make_layout(WORDS))

    @cute.jit
    def _rounded(self, acc):
        """fp16 copy of an accumulator."""
        operand, words = self._operand_registers()
        for i in cutlass.range_constexpr(WORDS):
            words[i] = pack(acc[2 * i], acc[2 * i + 1])
        return operand

    @cute.jit
    def _places(self, thread):
        """A lane's line of the squares that the warp moves at once, at each quarter of a panel: byte offsets.

        A warp holds 16 rows. Its registers are, for every 16 columns, the squares (upper, left), (lower, left),
        (upper, right), (lower, right), and an address belongs to one line of one of them. The 16-byte parts of a
        panel's line are stored at their number xor the row's last three bits.
        """
        lane = thread % 32
        line = lane % 8
        row = thread // 32 * 16 + lane // 8 % 2 * 8 + line
        part = (lane // 16) ^ line
        return tuple(row * (PANEL * 2) + (part ^ (2 * quarter)) * 16 for quarter in range(4))

    @cute.jit
    def _keep(self, operand, address, places):
        """An A operand in registers to the own rows of 128 columns in shared memory."""
        words = self._words(operand)
        for block in cutlass.range_constexpr(CHUNK // 16):
            at = address + places[block % 4] + block // 4 * PANEL_BYTES
            store_squares(at, *(words[4 * block + i] for i in range(4)))

    @cute.jit
    def _recall(self, acc, a, address, places):
        """acc ← a · what ``_keep`` stored there."""
        for block in cutlass.range_constexpr(CHUNK // 16):
            found = load_squares(address + places[block % 4] + block // 4 * PANEL_BYTES)
            for i in cutlass.range_constexpr(4):
                low, high = unpack(found[i])
                acc[8 * block + 2 * i] = a * low
                acc[8 * block + 2 * i + 1] = a * high

    @cute.jit
    def _multiply(self, mma, acc, a, b, blocks: cutlass.Constexpr[int], begin: cutlass.Constexpr[bool]):
        """acc ← A·Bᵀ where it begins, else acc + A·Bᵀ, over blocks of 16 along the inner axis."""
        for block in cutlass.range_constexpr(blocks):
            mma.set(warpgroup.Field.ACCUMULATE, not begin or block > 0)
            cute.gemm(mma, acc, a[(None, None, block)], b[(None, None, block)], acc)

    @cute.jit
    def _operand(self, mma, matrix):
        return mma.make_fragment_B(mma.get_slice(0).partition_B(matrix))

    @cute.jit
    def _gram(
        self, mma, x_own, x_other, own, beside, other, barriers, phase, rank, group, leader, places, thread
    ):
        """The own rows of A = XXᵀ, as two A operands and in shared memory; the own square also to the other block."""
        rows = mma.make_fragment_A(mma.get_slice(group * 128).partition_A(x_own))
        cute.arch.sync_threads()
        left = self._accumulator(mma)
        warpgroup.fence()
        self._multiply(mma, left, rows, self._operand(mma, x_own), self.k_blocks, True)
        warpgroup.commit_group()
        right = left
        if cutlass.const_expr(self.halves == 2):
            cute.arch.mbarrier_wait(barriers, phase)
            right = self._accumulator(mma)
            warpgroup.fence()
            self._multiply(mma, right, rows, self._operand(mma, x_other), self.k_blocks, True)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
        else:
            warpgroup.wait_group(0)
        first = self._rounded(left)
        self._keep(first, own.iterator.toint(), places)
        second = first
        if cutlass.const_expr(self.halves == 2):
            self._share(own, other, barriers + 1, rank, group, leader, HALF // PANEL)
            warpgroup.wait_group(0)
            second = self._rounded(right)
            self._keep(second, beside.iterator.toint(), places)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        return first, second

    @cute.jit
    def _polynomial(
        self, straight, turned, own, beside, other, turned_layout, first, second, barriers, phase, b, c, places,
        thread,
    ):
        """The own rows of P = bA + cA²."""
        blocks = HALF // 16
        left = self._accumulator(straight)
        warpgroup.fence()
        self._multiply(straight, left, first, self._operand(straight, own), blocks, True)
        right = left
        if cutlass.const_expr(self.halves == 2):
            self._multiply(straight, left, second, self._operand(straight, beside), blocks, False)
            right = self._accumulator(straight)
            across = cute.make_tensor(beside.iterator, turned_layout.outer)
            warpgroup.fence()
            self._multiply(turned, right, first, self._operand(turned, across), blocks, True)
            warpgroup.commit_group()
            cute.arch.mbarrier_wait(barriers + 1, phase)
            warpgroup.fence()
            self._multiply(straight, right, second, self._operand(straight, other), blocks, False)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        if cutlass.const_expr(self.halves == 2):
            self._expect(barriers, thread)
        first = self._combined(left, b, c, own.iterator.toint(), places)
        if cutlass.const_expr(self.halves == 2):
            second = self._combined(right, b, c, beside.iterator.toint(), places)
        return first, second

    @cute.jit
    def _combined(self, acc, b, c, address, places):
        """fp16 of b · A + c · acc; A is read again, as registers for it and for the accumulators do not suffice."""
        result, words = self._operand_registers()
        for block in cutlass.range_constexpr(CHUNK // 16):
            found = load_squares(address + places[block % 4] + block // 4 * PANEL_BYTES)
            for i in cutlass.range_constexpr(4):
                low, high = unpack(found[i])
                at = 4 * block + i
                words[at] = pack(b * low + c * acc[2 * at], b * high + c * acc[2 * at + 1])
        return result

    @cute.jit
    def _apply(self, mma, x_own, x_other, turned_layout, first, second, a, places):
        """The own rows of X ← aX + PX, in place once no block reads them any more."""
        blocks = HALF // 16
        results = []
        for chunk in cutlass.range_constexpr(self.chunks):
            acc = self._accumulator(mma)
            self._recall(acc, a, x_own.iterator.toint() + chunk * CHUNK_BYTES, places)
            warpgroup.fence()
            for factor, matrix in ((first, x_own), (second, x_other))[: self.halves]:
                part = cute.make_tensor(matrix.iterator + chunk * HALF * CHUNK, turned_layout.outer)
                self._multiply(mma, acc, factor, self._operand(mma, part), blocks, False)
            warpgroup.commit_group()
            results.append(acc)
        warpgroup.wait_group(0)
        # Reads alone come before: they are done, so the barrier need not wait for memory.
        if cutlass.const_expr(self.halves == 2):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        for chunk in cutlass.range_constexpr(self.chunks):
            self._keep(self._rounded(results[chunk]), x_own.iterator.toint() + chunk * CHUNK_BYTES, places)
