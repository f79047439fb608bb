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
from ._cutedsl_polar_exchange import CHUNK_BYTES, PolarExchange
from ._cutedsl_polar_memory import DTYPES, EXCHANGE, PANEL, PANEL_BYTES
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
    """X ← aX + (bA + cA²)X, A = XXᵀ, for matrices of at most 256 rows and columns, X held in shared memory.

    One block where m ≤ 128, else a cluster of two: a block owns 128 rows of X, of A and of P = bA + cA², two
    warpgroups of 64 rows each. Rows are numbered with the own half first, so both blocks run the same code.
    A block keeps all of X (own, other) and of A three quarters: its diagonal square, its rows of the square beside
    it (whose transpose is the one below: wgmma reads either order) and the other block's diagonal square.
    The own rows of A and P pass from accumulators to wgmma's A operand in registers. Per step the blocks exchange
    128 rows of X and one square of A, by bulk copies that count on the receiver's barrier; the products that need
    only own rows run meanwhile.
    """

    def __init__(self, problem: Problem, config: PolarConfig, sm_count: int) -> None:
        super().__init__(problem, config)
        self.steps = schedule(problem)[0]
        self.k_blocks = -(-min(self.n, self.cols) // 16)
        self.clusters = min(self.batch, sm_count // self.blocks)
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
            grid=[self.clusters * self.blocks, 1, 1],
            block=[POLAR_THREADS, 1, 1],
            cluster=[self.blocks, 1, 1],
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
        if cutlass.const_expr(self.blocks > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

        smem = SmemAllocator()
        x_own = self._matrix(smem, x_layout)
        x_other = self._matrix(smem, x_layout) if self.halves == 2 else None
        own = self._matrix(smem, square_layout)
        beside = self._matrix(smem, square_layout) if self.halves == 2 else None
        other = self._matrix(smem, square_layout) if self.halves == 2 else None
        sums = smem.allocate_tensor(Float32, cute.make_layout((EXCHANGE, self.blocks)), byte_alignment=16)
        partial = smem.allocate_tensor(Float32, cute.make_layout((EXCHANGE, POLAR_THREADS // 32)), byte_alignment=16)
        barriers = smem.allocate_array(Int64, 3, byte_alignment=8)
        if cutlass.const_expr(self.blocks > 1):
            if thread == 0:
                for i in cutlass.range_constexpr(3):
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
        index = block // self.blocks
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

    # Products. A half's accumulator: 64 rows of a warpgroup × 128 columns, 64 values a thread.

    @cute.jit
    def _accumulator(self, mma):
        acc = cute.make_rmem_tensor(mma.partition_shape_C((HALF, CHUNK)), Float32)
        return acc

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
        if cutlass.const_expr(self.groups > 1):
            warpgroup.wait_group(0)
            self._sum(left, right, own, other, barriers, phase, rank, group, leader, places, thread)
            first = self._fetched(own.iterator.toint(), places)
            second = first
            if cutlass.const_expr(self.halves == 2):
                second = self._fetched(beside.iterator.toint(), places)
        else:
            warpgroup.wait_group(self.halves - 1)
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
            if cutlass.const_expr(self.groups == 1):
                cute.arch.mbarrier_wait(barriers + 1, phase)
            warpgroup.fence()
            self._multiply(straight, right, second, self._operand(straight, other), blocks, False)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
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
            found = ops.load_squares(address + places[block % 4] + block // 4 * PANEL_BYTES)
            for i in cutlass.range_constexpr(4):
                low, high = ops.unpack(found[i])
                at = 4 * block + i
                words[at] = ops.pack(b * low + c * acc[2 * at], b * high + c * acc[2 * at + 1])
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
        self._pass()
        for chunk in cutlass.range_constexpr(self.chunks):
            self._keep(self._rounded(results[chunk]), x_own.iterator.toint() + chunk * CHUNK_BYTES, places)
