# mypy: ignore-errors
"""Kernel body of ``apply`` for sm_90a in CuTe DSL: a persistent TMA and wgmma product with TMA multicast."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, Int64, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import LayoutEnum, SmemAllocator
from cutlass.utils import hopper_helpers as hopper

from dmuon_tune.problem import Problem

from ._cutedsl_apply_epilogue import DTYPES, ApplyEpilogue
from ._cutedsl_apply_space import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    STAGED_ROWS,
    THREADS,
    TILE_K,
    WARPGROUPS,
    ApplyConfig,
    result_shape,
    smem_bytes,
)

TURN_BARRIER = 3  # named barriers: 1 and 2 are the epilogue's


class Program:
    """What the backend compiles: the entry point and stand-ins for its arguments but the stream."""

    def __init__(self, problem: Problem, config: ApplyConfig, sm_count: int) -> None:
        self.problem, self.smem_bytes = problem, smem_bytes(config)
        self.body = Apply(problem, config, sm_count)
        self.entry = getattr(self.body, {"none": "plain", "c": "with_x", "w": "with_w"}[problem.epilogue])

    def arguments(self) -> tuple:
        """Tensors contiguous and aligned to 16 bytes, in the op's order, then its scalars."""
        problem = self.problem
        matrix = (problem.batch, *result_shape(problem))
        factor = _tensor(DTYPES[problem.dtype], (problem.batch, problem.m, problem.m))
        x, alpha = _tensor(DTYPES[problem.dtype], matrix), Float32(1.0)
        if problem.epilogue == "w":
            return factor, x, _tensor(Int64, (problem.batch,), 8), _tensor(Float32, (problem.batch, 2), 8), alpha
        y = _tensor(DTYPES[problem.out_dtype], matrix)
        return (factor, x, y, alpha, Float32(1.0)) if problem.has_c else (factor, x, y, alpha)


def _tensor(dtype, shape: tuple[int, ...], alignment: int = 16):
    order = tuple(reversed(range(len(shape))))
    return cute.runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=alignment)


class Apply(ApplyEpilogue):
    """Y = α·Q·X (+ β·X), or W ← decay·W − rate·α·Q·X, for one problem and configuration, extents fixed.

    As stored: rows×cols = A·B with A (rows, k) and B (cols, k), which is Q·X in ``row`` layout (B contiguous along
    cols) and X·Qᵀ in ``col``. One block an SM walks the tiles: one warp fills a ring of shared-memory stages by TMA,
    two warpgroups multiply, both on one tile or each on its own. X for β·X passes through the same ring, after the
    tile's operands, so that it arrives while they are multiplied.
    """

    def __init__(self, problem: Problem, config: ApplyConfig, blocks: int) -> None:
        super().__init__(problem, config)
        self.row_layout, self.k = problem.layout == "row", problem.k
        self.stages, self.group = config.stages, config.group
        self.cluster = (config.cluster_m, config.cluster_n)
        self.cluster_size = config.cluster_m * config.cluster_n
        self.smem_bytes = smem_bytes(config)
        self.k_tiles = -(-self.k // TILE_K)
        self.x_tiles = self.tile[1] // TILE_K if self.has_x else 0
        # Tiles are counted in clusters: a cluster's blocks take neighbouring ones.
        self.tile_rows = -(-self.rows // (self.tile[0] * config.cluster_m))
        self.tile_cols = -(-self.cols // (self.tile[1] * config.cluster_n))
        self.tiles = self.tile_rows * self.tile_cols * self.batch
        self.clusters = min(self.tiles, blocks // self.cluster_size)

    # Entry points: one for each argument list of the op.

    @cute.jit
    def plain(self, q: cute.Tensor, x: cute.Tensor, y: cute.Tensor, alpha: Float32, stream):
        self._launch(q, x, y, None, None, alpha, Float32(0.0), stream)

    @cute.jit
    def with_x(self, q: cute.Tensor, x: cute.Tensor, y: cute.Tensor, alpha: Float32, beta: Float32, stream):
        self._launch(q, x, y, None, None, alpha, beta, stream)

    @cute.jit
    def with_w(self, q: cute.Tensor, x: cute.Tensor, w: cute.Tensor, rates: cute.Tensor, alpha: Float32, stream):
        self._launch(q, x, None, w, rates, alpha, Float32(0.0), stream)

    @cute.jit
    def _launch(self, q, x, y, w, rates, alpha, beta, stream):
        rows, cols, k = self.rows, self.cols, self.k
        matrix = cute.make_layout((rows, cols, self.batch), stride=(cols, 1, rows * cols))
        a_view = cute.make_tensor(
            q.iterator if self.row_layout else x.iterator,
            cute.make_layout((rows, k, self.batch), stride=(k, 1, rows * k)),
        )
        b_view = cute.make_tensor(
            x.iterator if self.row_layout else q.iterator,
            cute.make_layout((cols, k, self.batch), stride=((1, cols) if self.row_layout else (k, 1)) + (cols * k,)),
        )
        b_major = LayoutEnum.COL_MAJOR if self.row_layout else LayoutEnum.ROW_MAJOR
        a_smem = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (*self.tile, TILE_K), self.dtype, self.stages)
        b_smem = hopper.make_smem_layout_b(b_major, (*self.tile, TILE_K), self.dtype, self.stages)
        tiled_mma = hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            LayoutEnum.ROW_MAJOR.sm90_mma_major_mode(),
            b_major.sm90_mma_major_mode(),
            Float32,
            (1 if self.pingpong else WARPGROUPS, 1, 1),
            tiler_mn=(64, self.tile[1]),
        )
        a = self._load(a_view, a_smem, (self.tile[0], TILE_K), self.cluster[1])
        b = self._load(b_view, b_smem, (self.tile[1], TILE_K), self.cluster[0])
        staged = self.staged_layout()
        x_load, store = (None, None), (None, None)
        if cutlass.const_expr(self.has_x):
            x_load = self._load(cute.make_tensor(x.iterator, matrix), a_smem, (self.tile[0], TILE_K), 1)
        if cutlass.const_expr(not self.updates):
            store = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileS2GOp(),
                cute.make_tensor(y.iterator, matrix),
                cute.slice_(staged, (None, None, 0)),
                (STAGED_ROWS, self.staged_cols),
            )
        self._kernel(
            *a, *b, *x_load, *store, w, rates, alpha, beta, tiled_mma, a_smem, b_smem, staged
        ).launch(
            grid=[self.clusters * self.cluster_size, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[self.cluster_size, 1, 1],
            max_number_threads=[THREADS, 1, 1],  # caps the registers
            min_blocks_per_mp=1,
            smem=self.smem_bytes,  # the DSL warns where it allocates more; the tests turn that into an error
            use_pdl=True,
            stream=stream,
        )

    @cute.jit
    def _load(self, view, ring, tile: cutlass.Constexpr, sharers: cutlass.Constexpr[int]):
        """TMA atom and tensor of an operand; each of the blocks that share it loads a part for all of them."""
        operation = cpasync.CopyBulkTensorTileG2SMulticastOp() if sharers > 1 else cpasync.CopyBulkTensorTileG2SOp()
        return cpasync.make_tiled_tma_atom(
            operation, view, cute.slice_(ring, (None, None, 0)), tile, num_multicast=sharers
        )

    @cute.kernel
    def _kernel(
        self,
        a_atom: cute.CopyAtom,
        a_tma: cute.Tensor,
        b_atom: cute.CopyAtom,
        b_tma: cute.Tensor,
        x_atom: cute.CopyAtom | None,
        x_tma: cute.Tensor | None,
        y_atom: cute.CopyAtom | None,
        y_tma: cute.Tensor | None,
        w: cute.Tensor | None,
        rates: cute.Tensor | None,
        alpha: Float32,
        beta: Float32,
        tiled_mma: cute.TiledMma,
        a_smem: cute.ComposedLayout,
        b_smem: cute.ComposedLayout,
        staged_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        producer_warp = WARPGROUPS * 4
        if warp_index == producer_warp:
            for atom in (a_atom, b_atom, x_atom, y_atom):
                if cutlass.const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)

        smem = SmemAllocator()
        sa = smem.allocate_tensor(self.dtype, a_smem.outer, byte_alignment=1024, swizzle=a_smem.inner)
        sb = smem.allocate_tensor(self.dtype, b_smem.outer, byte_alignment=1024, swizzle=b_smem.inner)
        staged = smem.allocate_tensor(
            self.staged_dtype, staged_layout.outer, byte_alignment=1024, swizzle=staged_layout.inner
        )
        barriers = smem.allocate_array(Int64, 2 * self.stages, byte_alignment=8)
        # A stage is free when one lane of every warp that read it has arrived, from each block that it was loaded for.
        readers = 4 * (1 if self.pingpong else WARPGROUPS) * self.cluster_size
        ring = pipeline.PipelineTmaAsync.create(
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, readers),
            tx_count=(self.tile[0] + self.tile[1]) * TILE_K * 2,
            barrier_storage=barriers,
            cta_layout_vmnk=cute.make_layout((1, *self.cluster, 1)),
        )
        # Launched while the previous kernel of the stream drains: no global memory before this point.
        cute.arch.griddepcontrol_wait()

        if warp_index >= producer_warp:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_index == producer_warp:
                self._produce(ring, a_atom, a_tma, sa, b_atom, b_tma, sb, x_atom, x_tma)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self._consume(ring, tiled_mma, sa, sb, staged, (y_atom, y_tma), w, rates, alpha, beta, thread)
        if cutlass.const_expr(self.cluster_size > 1):
            # No block leaves while its neighbour may still signal a barrier of it.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def _place_in_cluster(self):
        return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if self.cluster_size > 1 else Int32(0)

    @cute.jit
    def _tile_of(self, index: Int32, place: Int32):
        """Linear index of a cluster's tiles and the block's place in it → (batch, tile row, tile column)."""
        per_matrix = self.tile_rows * self.tile_cols
        batch = index // per_matrix
        rest = index - batch * per_matrix
        first = rest // (self.group * self.tile_cols) * self.group
        height = cutlass.min(Int32(self.group), self.tile_rows - first)
        rest -= first * self.tile_cols
        col = rest // height
        row = first + rest - col * height
        row_in_cluster, col_in_cluster = place % self.cluster[0], place // self.cluster[0]
        return batch, row * self.cluster[0] + row_in_cluster, col * self.cluster[1] + col_in_cluster

    @cute.jit
    def _first_cluster(self):
        block, _, _ = cute.arch.block_idx()
        return block // self.cluster_size

    @cute.jit
    def _produce(self, ring, a_atom, a_tma, sa, b_atom, b_tma, sb, x_atom, x_tma):
        place = self._place_in_cluster()
        a_from, a_to = self._parts(a_atom, a_tma, sa, self.tile[0], self.cluster[1], place)
        b_from, b_to = self._parts(b_atom, b_tma, sb, self.tile[1], self.cluster[0], place)
        if cutlass.const_expr(self.has_x):
            x_from, x_to = self._parts(x_atom, x_tma, sa, self.tile[0], 1, place)
        both = Int16(3)  # blocks of a cluster; loads that are not shared ignore it
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        index = self._first_cluster()
        while index < self.tiles:
            batch, row, col = self._tile_of(index, place)
            for k_tile in cutlass.range(self.k_tiles, unroll=1):
                ring.producer_acquire(state)
                full = ring.producer_get_barrier(state)
                at = (None, state.index)
                cute.copy(a_atom, a_from[(None, row, k_tile, batch)], a_to[at], tma_bar_ptr=full, mcast_mask=both)
                cute.copy(b_atom, b_from[(None, col, k_tile, batch)], b_to[at], tma_bar_ptr=full, mcast_mask=both)
                state.advance()
            if cutlass.const_expr(self.has_x):
                for x_tile in cutlass.range(self.x_tiles, unroll=1):
                    ring.sync_object_empty.wait(state.index, state.phase)
                    ring.sync_object_full.arrive_and_expect_tx(state.index, self.tile[0] * TILE_K * 2)
                    full = ring.producer_get_barrier(state)
                    at = (None, row, col * self.x_tiles + x_tile, batch)
                    cute.copy(x_atom, x_from[at], x_to[(None, state.index)], tma_bar_ptr=full)
                    state.advance()
            index += self.clusters
        # Every load is issued: the next kernel's blocks may take the slots that blocks leave from now on.
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def _parts(self, atom, tma, ring, rows: cutlass.Constexpr[int], sharers: cutlass.Constexpr[int], place):
        """(memory's tiles, the ring's stages) as the block loads them, its part alone where it shares."""
        tiles = cute.local_tile(tma, (rows, TILE_K), (None, None, None))
        stages, source = cpasync.tma_partition(
            atom,
            place if sharers > 1 else 0,
            cute.make_layout(sharers),
            cute.group_modes(ring, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )
        return source, stages

    @cute.jit
    def _consume(self, ring, tiled_mma, sa, sb, staged, store, w, rates, alpha, beta, thread):
        group = cute.arch.make_warp_uniform(thread // 128)
        lane = thread % 128
        mma = tiled_mma.get_slice(0 if self.pingpong else group * 128)
        ra = tiled_mma.make_fragment_A(mma.partition_A(sa))
        rb = tiled_mma.make_fragment_B(mma.partition_B(sb))
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C(self.tile), Float32)
        if cutlass.const_expr(not self.updates):
            atom, y_tma = store
            tiles = cute.local_tile(y_tma, (STAGED_ROWS, self.staged_cols), (None, None, None))
            store = (atom, tiles)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        place, index = self._place_in_cluster(), self._first_cluster()
        if cutlass.const_expr(self.pingpong):
            index += group * self.clusters
            read = self._skip(read, group * (self.k_tiles + self.x_tiles))
            self._pass_turn(group, group == 1)  # the first tile is group 0's
        while index < self.tiles:
            batch, row, col = self._tile_of(index, place)
            row0, col0 = row * self.tile[0], col * self.tile[1]
            if cutlass.const_expr(self.updates):
                self.prefetch(w, batch, row0, col0, group, lane)
            if cutlass.const_expr(self.pingpong):
                cute.arch.barrier(barrier_id=TURN_BARRIER + group, number_of_threads=128 * WARPGROUPS)
            read = self._multiply(ring, read, tiled_mma, ra, rb, acc, group, index + self.clusters < self.tiles)
            if cutlass.const_expr(self.updates):
                self.update(acc, staged, w, rates, alpha, batch, row0, col0, group, lane)
            else:
                read = self.finish(
                    acc, ring, read, sa, staged, store, alpha, beta, batch, row0, col0, group, lane
                )
            index += self.clusters
            if cutlass.const_expr(self.pingpong):
                index += self.clusters
                read = self._skip(read, self.k_tiles + self.x_tiles)
        if cutlass.const_expr(not self.updates):
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory outlives the stores that read it

    @cute.jit
    def _multiply(self, ring, read, tiled_mma, ra, rb, acc, group, others_wait):
        """acc ← the tile's product; every stage of it is read and released. Returns the ring's state."""
        blocks = cute.size(ra, mode=[2])
        release = read.clone()
        tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
        ring.consumer_wait(read)
        warpgroup.fence()
        for block in cutlass.range_constexpr(blocks):
            at = (None, None, block, read.index)
            cute.gemm(tiled_mma, acc, ra[at], rb[at], acc)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        read.advance()
        for _ in cutlass.range(1, self.k_tiles, unroll=1):
            ring.consumer_wait(read)
            warpgroup.fence()
            for block in cutlass.range_constexpr(blocks):
                at = (None, None, block, read.index)
                cute.gemm(tiled_mma, acc, ra[at], rb[at], acc)
            warpgroup.commit_group()
            warpgroup.wait_group(1)  # the previous stage's products are done, so its buffer is free
            ring.consumer_release(release)
            release.advance()
            read.advance()
        if cutlass.const_expr(self.pingpong and not self.has_x):
            self._pass_turn(group, others_wait)
        warpgroup.wait_group(0)
        ring.consumer_release(release)
        if cutlass.const_expr(self.pingpong and self.has_x):
            # The other warpgroup can tell the rounds of the ring apart only when this one's stages have all arrived.
            ahead = read.clone()
            for _ in cutlass.range_constexpr(self.x_tiles):
                ring.consumer_wait(ahead)
                ahead.advance()
            self._pass_turn(group, others_wait)
        return read

    @cute.jit
    def _skip(self, state, count):
        """The ring's state after ``count`` stages that the other warpgroup reads."""
        index = state.index + count
        rounds = index // self.stages
        return pipeline.PipelineState(
            self.stages, state.count + count, index - rounds * self.stages, state.phase ^ (rounds & 1)
        )

    @cute.jit
    def _pass_turn(self, group, others_wait):
        """Let the other warpgroup multiply, if it will: one tile at a time, in the order that they are loaded."""
        if others_wait:
            cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + 1 - group, number_of_threads=128 * WARPGROUPS)
