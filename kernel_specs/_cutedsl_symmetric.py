# mypy: ignore-errors
"""Kernel body of a symmetric product for sm_90a in CuTe DSL: TMA loads, wgmma, lower tiles only, mirrored store."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import LayoutEnum, SmemAllocator
from cutlass.utils import hopper_helpers as hopper

from dmuon_tune.problem import Problem

from ._cutedsl_epilogue import DTYPES
from ._cutedsl_exchange import SUMS_BARRIER, SumExchange
from ._cutedsl_space import CHUNK, REGISTERS, SymmetricConfig, smem_bytes, threads

TURN_BARRIER = 4  # named barriers 4 and 5: one for each of two warpgroups taking turns


class Program:
    """What the backend compiles: the entry point and stand-ins for its arguments but the stream."""

    def __init__(self, problem: Problem, config: SymmetricConfig, sm_count: int) -> None:
        self.problem, self.smem_bytes = problem, smem_bytes(config)
        self.body = SymmetricProduct(problem, config, sm_count * config.blocks_per_sm)
        entries = {"none": "plain", "c": "with_c", "i": "with_i", "ci": "with_ci"}
        self.entry = getattr(self.body, "gram" if problem.op == "gram" else entries[problem.epilogue])

    def arguments(self) -> tuple:
        """Tensors contiguous and aligned to 16 bytes, in the op's order, then its scalars."""
        problem = self.problem
        inner = (problem.m, problem.k) if problem.layout == "row" else (problem.k, problem.m)
        operands = [_tensor(problem.dtype, (problem.batch, *inner))] * (1 if problem.op == "gram" else 2)
        square = (problem.batch, problem.m, problem.m)
        terms = [_tensor(problem.dtype, square)] if problem.has_c else []
        scalars = [Float32(1.0)] * (1 + problem.has_c + problem.has_identity)
        return (*operands, *terms, _tensor(problem.out_dtype, square), *scalars)


def _tensor(dtype: str, shape: tuple[int, ...]):
    return cute.runtime.make_fake_compact_tensor(DTYPES[dtype], shape, stride_order=(2, 1, 0), assumed_align=16)


class SymmetricProduct(SumExchange):
    """D = α·A·Bᵀ + β·C + γ·I for one problem and configuration, D symmetric, all extents fixed at compile time.

    Clusters of blocks walk the tiles that touch the lower triangle. In a block one warp fills a ring of shared-memory
    stages by TMA and one warp for each consumer warpgroup brings C's chunks; the consumers multiply and store.
    """

    def __init__(self, problem: Problem, config: SymmetricConfig, blocks: int) -> None:
        super().__init__(problem, config, blocks)
        self.k, self.row_major = problem.k, problem.layout == "row"
        self.tile_k, self.stages = config.tile_k, config.stages
        self.threads, self.blocks_per_sm = threads(config), config.blocks_per_sm
        self.smem_bytes = smem_bytes(config)
        # setmaxnreg needs a whole producer warpgroup; two spare warps beside one consumer group cost no registers.
        self.registers = REGISTERS.get(config.warpgroups)

    # Entry points: one for each argument list of the ops.

    @cute.jit
    def gram(self, x: cute.Tensor, r: cute.Tensor, alpha: Float32, stream):
        self._launch(x, x, None, r, alpha, Float32(0.0), Float32(0.0), stream)

    @cute.jit
    def plain(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, alpha: Float32, stream):
        self._launch(a, b, None, d, alpha, Float32(0.0), Float32(0.0), stream)

    @cute.jit
    def with_c(
        self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, d: cute.Tensor, alpha: Float32, beta: Float32, stream
    ):
        self._launch(a, b, c, d, alpha, beta, Float32(0.0), stream)

    @cute.jit
    def with_i(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, alpha: Float32, gamma: Float32, stream):
        self._launch(a, b, None, d, alpha, Float32(0.0), gamma, stream)

    @cute.jit
    def with_ci(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        c: cute.Tensor,
        d: cute.Tensor,
        alpha: Float32,
        beta: Float32,
        gamma: Float32,
        stream,
    ):
        self._launch(a, b, c, d, alpha, beta, gamma, stream)

    @cute.jit
    def _launch(self, a, b, c, d, alpha, beta, gamma, stream):
        strides = (self.k, 1, self.m * self.k) if self.row_major else (1, self.m, self.m * self.k)
        operand = cute.make_layout((self.m, self.k, self.batch), stride=strides)
        major = LayoutEnum.ROW_MAJOR if self.row_major else LayoutEnum.COL_MAJOR
        rings = self._rings(major)
        tiled_mma, chunk_mma = self._mmas(major.sm90_mma_major_mode())
        a_view, b_view = cute.make_tensor(a.iterator, operand), cute.make_tensor(b.iterator, operand)
        operands = self._operand_copies(a_view, b_view, rings)
        load = cpasync.CopyBulkTensorTileG2SOp()
        c_atom, c_tma = self._chunk_copy(load, self._view(c, self.batch), self.dtype) if self.has_c else (None, None)
        self.swizzle = self._chunk_layout(self.out_dtype).inner
        store = cpasync.CopyBulkTensorTileS2GOp()
        d_view = self._view(d, self.batch)
        d_atom, d_tma = self._chunk_copy(store, d_view, self.out_dtype) if self.tma_rows else (None, None)
        self._kernel(
            *operands, c_atom, c_tma, d_atom, d_tma, d, alpha, beta, gamma, tiled_mma, chunk_mma, *rings
        ).launch(
            grid=[self.clusters * self.blocks_together, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.blocks_together, 1, 1] if self.blocks_together > 1 else None,
            max_number_threads=[self.threads * self.blocks_per_sm, 1, 1],  # caps the registers
            min_blocks_per_mp=1,
            smem=self.smem_bytes,  # the DSL warns where it allocates more; the tests turn that into an error
            use_pdl=True,
            stream=stream,
        )

    def _rings(self, major):
        """Shared memory of A's and of B's stages."""
        return tuple(_operand_layout(major, (rows, self.tile_k), self.dtype, self.stages) for rows in self.tile)

    def _operand_copies(self, a_view, b_view, rings):
        """TMA of A's tiles and of B's, which a cluster shares by multicast."""
        load = cpasync.CopyBulkTensorTileG2SOp()
        share = cpasync.CopyBulkTensorTileG2SMulticastOp() if self.cluster > 1 else load
        a_smem, b_smem = (cute.slice_(ring, (None, None, 0)) for ring in rings)
        return (
            *cpasync.make_tiled_tma_atom(load, a_view, a_smem, (self.tile[0], self.tile_k)),
            *cpasync.make_tiled_tma_atom(
                share, b_view, b_smem, (self.tile[1], self.tile_k), num_multicast=self.cluster
            ),
        )

    def _mmas(self, mode):
        """The products of a tile, and how those of one chunk lie in a warpgroup's registers."""
        return tuple(
            hopper.make_trivial_tiled_mma(
                self.dtype, self.dtype, mode, mode, Float32, (warpgroups, 1, 1), tiler_mn=(rows, cols)
            )
            for warpgroups, rows, cols in ((self.tile_warpgroups, 64, self.tile[1]), (1, CHUNK, CHUNK))
        )

    def _chunk_copy(self, op, view, dtype):
        """TMA between one chunk in shared memory and its place in C or D."""
        return cpasync.make_tiled_tma_atom(op, view, self._chunk_layout(dtype), (CHUNK, CHUNK))

    def _view(self, tensor, matrices: int):
        """So many m×m matrices one after another."""
        layout = cute.make_layout((self.m, self.m, matrices), stride=(self.m, 1, self.m * self.m))
        return cute.make_tensor(tensor.iterator, layout)

    def _chunk_layout(self, dtype):
        return cute.slice_(_operand_layout(LayoutEnum.ROW_MAJOR, (CHUNK, CHUNK), dtype, 1), (None, None, 0))

    @cute.kernel
    def _kernel(
        self,
        a_atom: cute.CopyAtom,
        a_tma: cute.Tensor,
        b_atom: cute.CopyAtom,
        b_tma: cute.Tensor,
        c_atom: cute.CopyAtom | None,
        c_tma: cute.Tensor | None,
        d_atom: cute.CopyAtom | None,
        d_tma: cute.Tensor | None,
        d: cute.Tensor,
        alpha: Float32,
        beta: Float32,
        gamma: Float32,
        tiled_mma: cute.TiledMma,
        chunk_mma: cute.TiledMma,
        a_smem: cute.ComposedLayout,
        b_smem: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        producer_warp = 4 * self.warpgroups
        if warp_index == producer_warp:
            cpasync.prefetch_descriptor(a_atom)
            cpasync.prefetch_descriptor(b_atom)
            if cutlass.const_expr(self.has_c):
                cpasync.prefetch_descriptor(c_atom)
            if cutlass.const_expr(self.tma_rows):
                cpasync.prefetch_descriptor(d_atom)

        sa, sb, chunks, c_barriers, ring = self._shared_memory(a_smem, b_smem, thread)
        # Launched while the previous kernel of the stream drains: no global memory before this point.
        cute.arch.griddepcontrol_wait()

        shared, scalars = (chunks, c_barriers), (alpha, beta, gamma)
        if warp_index >= producer_warp:
            if cutlass.const_expr(self.registers is not None):
                cute.arch.setmaxregister_decrease(self.registers[0])
            if warp_index == producer_warp:
                self._produce(ring, a_atom, a_tma, sa, b_atom, b_tma, sb)
            elif warp_index <= producer_warp + self.warpgroups:
                if cutlass.const_expr(self.has_c):
                    self._bring_c(c_atom, c_tma, shared, warp_index - producer_warp - 1)
        else:
            if cutlass.const_expr(self.registers is not None):
                cute.arch.setmaxregister_increase(self.registers[1])
            self._consume(ring, tiled_mma, chunk_mma, sa, sb, shared, d_atom, d_tma, d, scalars, thread)

    @cute.jit
    def _shared_memory(self, a_smem, b_smem, thread):
        """The operands' ring, the chunks and all barriers, which every thread of the cluster may use from here on."""
        smem = SmemAllocator()
        sa = smem.allocate_tensor(self.dtype, a_smem.outer, byte_alignment=1024, swizzle=a_smem.inner)
        sb = smem.allocate_tensor(self.dtype, b_smem.outer, byte_alignment=1024, swizzle=b_smem.inner)
        chunks = smem.allocate_array(self.out_dtype, self.slots * CHUNK * CHUNK, byte_alignment=1024)
        barriers = smem.allocate_array(Int64, 2 * self.stages, byte_alignment=8)
        c_barriers = smem.allocate_array(Int64, self.slots, byte_alignment=8)  # full ones, then empty ones
        stage_bytes = (self.tile[0] + self.tile[1]) * self.tile_k * 2
        ring = pipeline.PipelineTmaAsync.create(
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            # One lane of every warp that reads a stage, here or in the cluster, arrives on its empty barrier.
            consumer_group=pipeline.CooperativeGroup(
                pipeline.Agent.Thread, 4 * self.tile_warpgroups * self.cluster
            ),
            tx_count=stage_bytes,
            barrier_storage=barriers,
            cta_layout_vmnk=cute.make_layout((1, self.cluster, 1, self.split)),
            defer_sync=True,
        )
        if cutlass.const_expr(self.has_c):
            if thread < self.slots:
                cute.arch.mbarrier_init(c_barriers + thread, 1)
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.blocks_together > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        return sa, sb, chunks, c_barriers, ring

    @cute.jit
    def _produce(self, ring, a_atom, a_tma, sa, b_atom, b_tma, sb):
        _, rank = self._place_in_cluster()
        index = self._first_tile(0)
        a_to, a_from, b_to, b_from = self._tiles(a_atom, a_tma, sa, b_atom, b_tma, sb)
        mask = self._sharers()
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        while index < self.total:
            batch, row, col = self._block_tile(index, rank)
            first, count = self._k_range(index, rank)
            for k_tile in cutlass.range(first, first + count, unroll=1):
                ring.producer_acquire(state)
                full = ring.producer_get_barrier(state)
                cute.copy(
                    a_atom, a_from[(None, row, k_tile, batch)], a_to[(None, state.index)], tma_bar_ptr=full
                )
                cute.copy(
                    b_atom, b_from[(None, col, k_tile, batch)], b_to[(None, state.index)], tma_bar_ptr=full,
                    mcast_mask=mask,
                )
                state.advance()
            index = self._next_tile(index)
        # Every load is issued: the next kernel's blocks may take the slots that blocks leave from now on.
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.cluster > 1):
            ring.producer_tail(state)  # the other block still signals to this one's barriers

    @cute.jit
    def _tiles(self, a_atom, a_tma, sa, b_atom, b_tma, sb):
        """Shared and global side of the operands' TMA: A's stages and tiles, then B's (or the block's part of them)."""
        _, rank = self._place_in_cluster()
        ga = cute.local_tile(a_tma, (self.tile[0], self.tile_k), (None, None, None))
        gb = cute.local_tile(b_tma, (self.tile[1], self.tile_k), (None, None, None))
        one, sharers = cute.make_layout(1), cute.make_layout(self.cluster)
        part = rank if cutlass.const_expr(self.cluster > 1) else 0
        a_to, a_from = cpasync.tma_partition(a_atom, 0, one, cute.group_modes(sa, 0, 2), cute.group_modes(ga, 0, 2))
        b_to, b_from = cpasync.tma_partition(
            b_atom, part, sharers, cute.group_modes(sb, 0, 2), cute.group_modes(gb, 0, 2)
        )
        return a_to, a_from, b_to, b_from

    def _sharers(self):
        """Mask of the blocks that a multicast reaches."""
        return cutlass.Int16((1 << self.cluster) - 1) if self.cluster > 1 else None

    @cute.jit
    def _bring_c(self, c_atom, c_tma, shared, group):
        _, rank = self._place_in_cluster()
        chunks, barriers = shared
        self._stand_by()
        index, count = self._first_tile(group), Int32(0)
        while index < self.total:
            batch, row, col = self._block_tile(index, rank)
            count = self.load_c(
                c_atom, c_tma, self._chunks(chunks, self.dtype, False), barriers, group, rank, index >= self.whole,
                row, col, batch, count,
            )
            index = self._own_next(index)
        self._end_sharing()

    @cute.jit
    def _consume(self, ring, tiled_mma, chunk_mma, sa, sb, shared, d_atom, d_tma, d, scalars, thread):
        group = cute.arch.make_warp_uniform(thread // 128)
        mma = tiled_mma.get_slice(0 if self.pingpong else group * 128)
        ra = tiled_mma.make_fragment_A(mma.partition_A(sa))
        rb = tiled_mma.make_fragment_B(mma.partition_B(sb))
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C(self.tile), Float32)
        _, rank = self._place_in_cluster()
        index = self._first_tile(group)
        done, stored = Int32(0), Int32(0)  # tiles along k of the block's walk, chunks of this warpgroup
        if cutlass.const_expr(self.pingpong):
            done = group * self.k_tiles
            if group == 1:
                self._your_turn(0)
            if group != self.last_turn:
                self._stand_by()
        while index < self.total:
            batch, row, col = self._block_tile(index, rank)
            _, k_tiles = self._k_range(index, rank)
            if cutlass.const_expr(self.pingpong):
                cute.arch.barrier(barrier_id=TURN_BARRIER + group, number_of_threads=256)
            self._multiply(ring, tiled_mma, ra, rb, acc, done, k_tiles)
            if cutlass.const_expr(self.pingpong):
                # All of this tile's stages have been waited for: the other's waits cannot take them for its own.
                if self._next_tile(index) < self.total:
                    self._your_turn(1 - group)
            warpgroup.wait_group(0)
            ring.consumer_release(self._stage(done + k_tiles - 1))
            if cutlass.const_expr(self.split > 1):
                if index >= self.whole:
                    self._exchange(acc, sa, group, rank, row, col, thread)
            stored = self.store(
                acc, chunk_mma, shared, d_atom, d_tma, d, scalars, group, rank, index >= self.whole, row, col, batch,
                stored, thread % 128,
            )
            done += self.k_tiles * (2 if self.pingpong else 1)
            index = self._own_next(index)
        if cutlass.const_expr(self.tma_rows):
            if thread % 128 // 32 == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        if cutlass.const_expr(self.split > 1 and self.pingpong):
            if group != self.last_turn and self._shares():
                cute.arch.barrier_arrive(barrier_id=SUMS_BARRIER, number_of_threads=256)
        self._end_sharing()

    def _stage(self, count):
        """Where the ring's ``count``-th stage lies, for a consumer."""
        return pipeline.PipelineState(self.stages, count, count % self.stages, count // self.stages & 1)

    def _your_turn(self, group):
        cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + group, number_of_threads=256)

    @cute.jit
    def _multiply(self, ring, tiled_mma, ra, rb, acc, done, k_tiles, kept=None):
        """acc ← A·Bᵀ over the block's part of k, the last products in flight, all stages but the last ones released.

        ``kept`` says how many of them are not: one where it is None.
        """
        blocks = cute.size(ra, mode=[2])
        tiled_mma.set(warpgroup.Field.ACCUMULATE, False)  # zeros written by threads would serialize the products
        read, release = self._stage(done), self._stage(done)
        ring.consumer_wait(read)
        warpgroup.fence()
        for block in cutlass.range_constexpr(blocks):
            at = (None, None, block, read.index)
            cute.gemm(tiled_mma, acc, ra[at], rb[at], acc)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        read.advance()
        for k_tile in cutlass.range(1, k_tiles, unroll=1):
            ring.consumer_wait(read)
            warpgroup.fence()
            for block in cutlass.range_constexpr(blocks):
                at = (None, None, block, read.index)
                cute.gemm(tiled_mma, acc, ra[at], rb[at], acc)
            warpgroup.commit_group()
            warpgroup.wait_group(1)  # the previous stage's products are done, so its buffer is free
            if cutlass.const_expr(kept is None):
                ring.consumer_release(release)
                release.advance()
            else:
                if k_tile <= k_tiles - kept:
                    ring.consumer_release(release)
                    release.advance()
            read.advance()


def _operand_layout(major, shape, dtype, stages):
    """Swizzled shared-memory ring of one operand: (rows, k, stage)."""
    contiguous = shape[1] if major == LayoutEnum.ROW_MAJOR else shape[0]
    atom = warpgroup.make_smem_layout_atom(hopper.get_smem_layout_atom(major, dtype, contiguous), dtype)
    order = (0, 1, 2) if major == LayoutEnum.ROW_MAJOR else (1, 0, 2)
    return cute.tile_to_shape(atom, (*shape, stages), order=order)
