# mypy: ignore-errors
"""Kernel body of the whole Newton–Schulz recurrence of small matrices for sm_90a in CuTe DSL: one cluster a matrix."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import SmemAllocator
from cutlass.utils import hopper_helpers as hopper

from dmuon_tune.problem import Problem

from . import _cutedsl_polar_ops as ops
from ._cutedsl_polar_exchange import CHUNK_BYTES, PART, PolarExchange
from ._cutedsl_polar_memory import DTYPES, PANEL, PANEL_BYTES, TRIALS
from ._cutedsl_polar_space import CHUNK, HALF, POLAR_THREADS, PolarConfig, smem_bytes
from .polar_small import schedule


class Program:
    """What the backend compiles: the entry point and stand-ins for its arguments but the stream."""

    def __init__(self, problem: Problem, config: PolarConfig, sm_count: int) -> None:
        self.problem, self.smem_bytes = problem, smem_bytes(problem, config)
        self.entry = SmallPolar(problem, config, sm_count).launch

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


class SmallPolar(PolarExchange):
    """X ← aX + (bA + cA²)X, A = XXᵀ, for matrices of at most 256 rows, X held in shared memory.

    A matrix has one block where m ≤ 128, else two: each owns 128 rows of X, of A and of P = bA + cA², two warpgroups of
    64 rows. Rows are numbered with the own half first, so both run the same code. A block keeps all of X (own, other)
    and of A three quarters: its diagonal square, its rows of the square beside it (whose transpose is the one below:
    wgmma reads either order) and the other block's diagonal square. P passes from accumulators to wgmma's A operand in
    registers. Per step the blocks exchange 128 rows of X and one square of A.

    Column groups: as many times that, each with its own columns of X; A is summed over them.

    Rounding, storing and sending overlap with products that do not need them: a step's own square of A is formed while
    rows of X come, A² is begun while A is stored, X is updated by P's own columns while its others are not yet summed.
    """

    def __init__(self, problem: Problem, config: PolarConfig, sm_count: int) -> None:
        super().__init__(problem, config)
        self.steps = schedule(problem)[0]
        self.k_blocks = -(-min(self.n, self.cols) // 16)
        self.blocks_per_sm = config.blocks_per_sm
        self.clusters = min(self.batch, sm_count * self.blocks_per_sm // self.blocks)
        self.smem_bytes = smem_bytes(problem, config)

    @cute.jit
    def launch(
        self, u: cute.Tensor, coefficients: cute.Tensor, y: cute.Tensor, norm_factor: Float32, stream
    ):
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        rows = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float16)
        cols = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, Float16)
        x_layout = cute.tile_to_shape(rows, (HALF, self.cols), order=(0, 1))
        square_layout = cute.tile_to_shape(rows, (HALF, HALF), order=(0, 1))
        # The same bytes as a square, read as its transpose: (column, row).
        turned_layout = cute.tile_to_shape(cols, (HALF, HALF), order=(1, 0))
        shape = {"atom_layout_mnk": (2, 1, 1), "tiler_mn": (64, CHUNK)}
        memory, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        mma, mma_turned, mma_apply = (
            hopper.make_trivial_tiled_mma(Float16, Float16, k_major, major, Float32, a_source=source, **shape)
            for major, source in ((k_major, memory), (mn_major, memory), (mn_major, registers))
        )
        self._kernel(
            u, coefficients, y, norm_factor, mma, mma_turned, mma_apply, x_layout, square_layout, turned_layout
        ).launch(
            grid=[self.clusters * self.blocks, 1, 1],
            block=[POLAR_THREADS, 1, 1],
            cluster=[self.blocks, 1, 1],
            max_number_threads=[POLAR_THREADS * self.blocks_per_sm, 1, 1],  # caps the registers
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
        mma: cute.TiledMma,
        mma_turned: cute.TiledMma,
        mma_apply: cute.TiledMma,
        x_layout: cute.ComposedLayout,
        square_layout: cute.ComposedLayout,
        turned_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        rank = Int32(0)
        if cutlass.const_expr(self.blocks > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

        smem = SmemAllocator()
        x_own = self._matrix(smem, x_layout)
        x_other = self._matrix(smem, x_layout) if self.halves == 2 else None
        own = self._matrix(smem, square_layout)
        beside = self._matrix(smem, square_layout) if self.halves == 2 else None
        other = self._matrix(smem, square_layout) if self.halves == 2 else None
        sums = smem.allocate_tensor(Float32, cute.make_layout((TRIALS, self.blocks)), byte_alignment=8)
        partial = smem.allocate_tensor(Float32, cute.make_layout((TRIALS, POLAR_THREADS // 32)), byte_alignment=8)
        barriers = smem.allocate_array(Int64, 4, byte_alignment=8)
        if cutlass.const_expr(self.blocks > 1):
            if thread == 0:
                for i in cutlass.range_constexpr(4):
                    cute.arch.mbarrier_init(barriers + i, 1)
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
        late = self.chunks - 1
        index = block // self.blocks
        while index < self.batch:
            self._load(u, norm_factor, x_own, sums, partial, index, rank, thread)
            self._share(x_own, x_other, 0, late * CHUNK // PANEL, barriers, rank, group, leader)
            self._arrive()
            for step in cutlass.range(self.steps, unroll=1):
                a, b, c = (coefficients[step, i] for i in range(3))
                b = b * Float32(self.scale**-2)
                c = c * Float32(self.scale**-4)
                going_on = leader
                if step + 1 == self.steps:
                    going_on = Int32(0)
                straight, across = self._squares(
                    mma, mma_turned, x_own, x_other, own, beside, other, turned_layout, barriers, phase, rank, group,
                    leader, places, thread,
                )
                self._apply(
                    mma_apply, x_own, x_other, own, beside, turned_layout, straight, across, (a, b, c), barriers, rank,
                    group, going_on, places, thread,
                )
                phase = phase ^ 1
            self._wait()
            self._store(y, x_own, index, rank, thread)
            index += self.clusters

    @cute.jit
    def _matrix(self, smem, layout):
        return smem.allocate_tensor(Float16, layout.outer, byte_alignment=1024, swizzle=layout.inner)

    # Products. An accumulator: 64 rows of a warpgroup × 128 columns, 64 values a thread.

    @cute.jit
    def _accumulator(self, mma):
        acc = cute.make_rmem_tensor(mma.partition_shape_C((HALF, CHUNK)), Float32)
        return acc

    @cute.jit
    def _rows(self, mma, matrix, group):
        """The warpgroup's rows of a matrix in shared memory, as wgmma's A operand."""
        return mma.make_fragment_A(mma.get_slice(group * 128).partition_A(matrix))

    @cute.jit
    def _multiply(
        self, mma, acc, a, matrix, blocks: cutlass.Constexpr[int], begin: cutlass.Constexpr[bool]
    ):
        """acc ← A·Bᵀ where it begins, else acc + A·Bᵀ, over blocks of 16 along the inner axis; one group of wgmma."""
        b = mma.make_fragment_B(mma.get_slice(0).partition_B(matrix))
        warpgroup.fence()
        for block in cutlass.range_constexpr(blocks):
            mma.set(warpgroup.Field.ACCUMULATE, not begin or block > 0)
            cute.gemm(mma, acc, a[(None, None, block)], b[(None, None, block)], acc)
        warpgroup.commit_group()

    @cute.jit
    def _squares(
        self, mma, mma_turned, x_own, x_other, own, beside, other, turned_layout, barriers, phase, rank, group, leader,
        places, thread,
    ):
        """A = XXᵀ into shared memory, then the own rows of A² begun: accumulators of the own and the other columns.

        The rows of X that come last and the other block's square of A come while products of own rows run, and
        accumulators are rounded and stored meanwhile.
        """
        two, blocks = self.halves == 2, HALF // 16
        rows = self._rows(mma, x_own, group)
        left = self._accumulator(mma)
        self._multiply(mma, left, rows, x_own, self.k_blocks, True)
        self._wait()
        late = (self.chunks - 1) * CHUNK // PANEL
        self._share(x_own, x_other, late, CHUNK // PANEL, barriers, rank, group, leader)
        right = left
        if cutlass.const_expr(two):
            cute.arch.mbarrier_wait(barriers, phase)
            right = self._accumulator(mma)
            self._multiply(mma, right, rows, x_other, self.k_blocks, True)
        warpgroup.wait_group(self.halves - 1)
        if cutlass.const_expr(self.groups > 1):
            sums = cute.make_rmem_tensor((PART, self.parts), Float32)
            sums.fill(0.0)
            self._part(left, 0, sums, own, barriers, rank, thread)
            if cutlass.const_expr(two):
                warpgroup.wait_group(0)
                self._part(right, 2, sums, own, barriers, rank, thread)
            self._sum(sums, own, other, barriers, phase, rank, group, leader, places, thread)
        else:
            self._keep(self._rounded(left), own.iterator.toint(), places)
        self._written()
        cute.arch.sync_threads()
        if cutlass.const_expr(self.groups == 1):
            self._share(own, other, 0, HALF // PANEL, barriers + 1, rank, group, leader)
        straight = self._accumulator(mma)
        self._multiply(mma, straight, self._rows(mma, own, group), own, blocks, True)
        across = straight
        if cutlass.const_expr(two):
            if cutlass.const_expr(self.groups == 1):
                warpgroup.wait_group(1)
                self._keep(self._rounded(right), beside.iterator.toint(), places)
                self._written()
                cute.arch.sync_threads()
            rest = self._rows(mma, beside, group)
            self._multiply(mma, straight, rest, beside, blocks, False)
            across = self._accumulator(mma)
            turned = cute.make_tensor(beside.iterator, turned_layout.outer)
            self._multiply(mma_turned, across, self._rows(mma_turned, own, group), turned, blocks, True)
            cute.arch.mbarrier_wait(barriers + 1, phase)
            self._multiply(mma, across, rest, other, blocks, False)
        return straight, across

    @cute.jit
    def _combined(self, acc, b, c, address, places):
        """fp16 of b · A + c · acc; A is read again, as registers for it and for the accumulators do not suffice."""
        result, words = self._operand_registers()
        for block in cutlass.range_constexpr(CHUNK // 16):
            found = ops.load_squares(address + places[block % 4] + block // 4 * PANEL_BYTES)
            for i in cutlass.range_constexpr(4):
                low, high = ops.unpack(found[i])
                at = 4 * block + i
                words[at] = ops.pack(b * low + c * acc[2 * at], b * high + c * acc[2 * at + 1])
        return result

    @cute.jit
    def _apply(
        self, mma, x_own, x_other, own, beside, turned_layout, straight, across, triple, barriers, rank, group,
        going_on, places, thread,
    ):
        """P = bA + cA², then the own rows of X ← aX + PX, in place as soon as no block reads a chunk's columns.

        P's own columns multiply while its others are still being summed up, and a chunk is rounded, stored and sent
        while the next one multiplies. The last one is sent in the next step.
        """
        two, blocks = self.halves == 2, HALF // 16
        a, b, c = triple
        address = x_own.iterator.toint()
        warpgroup.wait_group(2 * (self.halves - 1))
        first = self._combined(straight, b, c, own.iterator.toint(), places)
        second = first
        results = []
        for chunk in cutlass.range_constexpr(self.chunks):
            acc = self._accumulator(mma)
            self._recall(acc, a, address + chunk * CHUNK_BYTES, places)
            self._multiply(mma, acc, first, self._turned(x_own, chunk, turned_layout), blocks, False)
            if cutlass.const_expr(two):
                if cutlass.const_expr(chunk == 0):
                    warpgroup.wait_group(1)
                    self._expect(barriers, thread)
                    second = self._combined(across, b, c, beside.iterator.toint(), places)
                self._multiply(mma, acc, second, self._turned(x_other, chunk, turned_layout), blocks, False)
            results.append(acc)
        if cutlass.const_expr(self.halves == 1):
            self._expect(barriers, thread)
        for chunk in cutlass.range_constexpr(self.chunks):
            last = chunk == self.chunks - 1
            warpgroup.wait_group((self.chunks - 1 - chunk) * self.halves)
            # Reads alone come before the barriers: they are done, so nothing need be made visible.
            if cutlass.const_expr(two or last):
                self._arrive()
            if cutlass.const_expr(two and not last):
                self._wait()
            else:
                cute.arch.sync_threads()
            self._keep(self._rounded(results[chunk]), address + chunk * CHUNK_BYTES, places)
            self._written()
            if cutlass.const_expr(last):
                cute.arch.sync_threads()
            else:
                self._group_barrier(group)
                self._share(
                    x_own, x_other, chunk * CHUNK // PANEL, CHUNK // PANEL, barriers, rank, group, going_on
                )

    @cute.jit
    def _turned(self, matrix, chunk, turned_layout):
        """A chunk's columns of X's rows in shared memory, as the B operand of a product with rows of X."""
        return cute.make_tensor(matrix.iterator + chunk * HALF * CHUNK, turned_layout.outer)
