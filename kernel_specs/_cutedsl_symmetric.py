# mypy: ignore-errors
"""Kernel body of a symmetric product for sm_90a in CuTe DSL: TMA loads, wgmma, lower tiles only, mirrored store."""

from __future__ import annotations

from math import lcm

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import LayoutEnum, SmemAllocator
from cutlass.utils import hopper_helpers as hopper

from dmuon_tune.problem import Problem

from ._cutedsl_epilogue import DTYPES, SymmetricEpilogue
from ._cutedsl_space import CONSUMER_REGISTERS, PRODUCER_REGISTERS, SymmetricConfig, smem_bytes, threads


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


class SymmetricProduct(SymmetricEpilogue):
    """D = α·A·Bᵀ + β·C + γ·I for one problem and configuration, D symmetric, all extents fixed at compile time.

    One block per SM slot walks the tiles that touch the lower triangle: one producer warp fills a ring of
    shared-memory stages by TMA, the consumer warpgroups multiply and store each tile and its mirror image.
    """

    def __init__(self, problem: Problem, config: SymmetricConfig, blocks: int) -> None:
        super().__init__(problem, config)
        self.k, self.row_major = problem.k, problem.layout == "row"
        self.tile_k, self.stages = config.tile_k, config.stages
        self.threads, self.blocks_per_sm = threads(config), config.blocks_per_sm
        self.smem_bytes = smem_bytes(config)
        # setmaxnreg needs a whole producer warpgroup; one spare warp beside one consumer group costs no registers.
        self.moves_registers = config.warpgroups > 1
        self.k_tiles = -(-self.k // config.tile_k)
        self._plan_tiles(config.group)
        self.grid = min(self.tiles * self.batch, blocks)

    def _plan_tiles(self, group: int) -> None:
        """Rows of tiles are walked in groups: a group's full rectangle column by column, then its jagged end."""
        tile_m, tile_n = self.tile
        period = lcm(tile_m, tile_n) // tile_m
        self.group = -(-group // period) * period
        self.group_cols = self.group * tile_m // tile_n
        self.rows = -(-self.m // tile_m)
        jagged = [-(-(row + 1) * tile_m // tile_n) for row in range(self.group)]
        self.jagged_starts = [sum(jagged[:row]) for row in range(self.group)]
        self.jagged_total = sum(jagged)
        cols = -(-self.m // tile_n)
        self.tiles = sum(min(-(-(row + 1) * tile_m // tile_n), cols) for row in range(self.rows))

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
        (tile_m, tile_n), tile_k = self.tile, self.tile_k
        strides = (self.k, 1, self.m * self.k) if self.row_major else (1, self.m, self.m * self.k)
        operand = cute.make_layout((self.m, self.k, self.batch), stride=strides)
        major = LayoutEnum.ROW_MAJOR if self.row_major else LayoutEnum.COL_MAJOR
        a_smem = _operand_layout(major, (tile_m, tile_k), self.dtype, self.stages)
        b_smem = _operand_layout(major, (tile_n, tile_k), self.dtype, self.stages)
        mode = major.sm90_mma_major_mode()
        tiled_mma = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, mode, mode, Float32, (self.warpgroups, 1, 1), tiler_mn=(64, tile_n)
        )
        load = cpasync.CopyBulkTensorTileG2SOp()
        a_view, b_view = cute.make_tensor(a.iterator, operand), cute.make_tensor(b.iterator, operand)
        a_atom, a_tma = cpasync.make_tiled_tma_atom(
            load, a_view, cute.slice_(a_smem, (None, None, 0)), (tile_m, tile_k)
        )
        b_atom, b_tma = cpasync.make_tiled_tma_atom(
            load, b_view, cute.slice_(b_smem, (None, None, 0)), (tile_n, tile_k)
        )
        self._kernel(a_atom, a_tma, b_atom, b_tma, c, d, alpha, beta, gamma, tiled_mma, a_smem, b_smem).launch(
            grid=[self.grid, 1, 1],
            block=[self.threads, 1, 1],
            max_number_threads=[self.threads * self.blocks_per_sm, 1, 1],  # caps the registers
            min_blocks_per_mp=1,
            smem=self.smem_bytes,  # the DSL warns where it allocates more; the tests turn that into an error
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def _kernel(
        self,
        a_atom: cute.CopyAtom,
        a_tma: cute.Tensor,
        b_atom: cute.CopyAtom,
        b_tma: cute.Tensor,
        c: cute.Tensor | None,
        d: cute.Tensor,
        alpha: Float32,
        beta: Float32,
        gamma: Float32,
        tiled_mma: cute.TiledMma,
        a_smem: cute.ComposedLayout,
        b_smem: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        producer_warp = self.consumers // 32
        if warp_index == producer_warp:
            cpasync.prefetch_descriptor(a_atom)
            cpasync.prefetch_descriptor(b_atom)

        smem = SmemAllocator()
        sa = smem.allocate_tensor(self.dtype, a_smem.outer, byte_alignment=1024, swizzle=a_smem.inner)
        sb = smem.allocate_tensor(self.dtype, b_smem.outer, byte_alignment=1024, swizzle=b_smem.inner)
        direct, mirror = self.epilogue_buffers(smem)
        barriers = smem.allocate_array(Int64, 2 * self.stages, byte_alignment=8)
        stage_bytes = (self.tile[0] + self.tile[1]) * self.tile_k * 2
        ring = pipeline.PipelineTmaAsync.create(
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            # One lane of every consumer warp arrives on a stage's empty barrier.
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, self.consumers // 32),
            tx_count=stage_bytes,
            barrier_storage=barriers,
        )
        # Launched while the previous kernel of the stream drains: no global memory before this point.
        cute.arch.griddepcontrol_wait()

        if warp_index >= producer_warp:
            if cutlass.const_expr(self.moves_registers):
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_index == producer_warp:
                self._produce(ring, a_atom, a_tma, sa, b_atom, b_tma, sb)
        else:
            if cutlass.const_expr(self.moves_registers):
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self._consume(ring, tiled_mma, sa, sb, direct, mirror, c, d, alpha, beta, gamma, thread)

    @cute.jit
    def _tile_of(self, index: Int32):
        """Linear index → (batch, tile row, tile column)."""
        batch = index // self.tiles
        rest = index - batch * self.tiles
        first_row = Int32(0)
        base = Int32(0)
        size = Int32(self.jagged_total)
        while rest >= size:
            rest -= size
            first_row += self.group
            base += self.group_cols
            size += self.group * self.group_cols
        rows = cutlass.min(Int32(self.group), self.rows - first_row)
        row = first_row
        col = Int32(0)
        if rest < rows * base:
            col = rest // rows
            row = first_row + (rest - col * rows)
        else:
            jagged = rest - rows * base
            start = Int32(0)
            for r in cutlass.range_constexpr(1, self.group):
                if jagged >= self.jagged_starts[r]:
                    row = first_row + r
                    start = Int32(self.jagged_starts[r])
            col = base + jagged - start
        return batch, row, col

    @cute.jit
    def _produce(self, ring, a_atom, a_tma, sa, b_atom, b_tma, sb):
        (tile_m, tile_n), tile_k = self.tile, self.tile_k
        ga = cute.local_tile(a_tma, (tile_m, tile_k), (None, None, None))
        gb = cute.local_tile(b_tma, (tile_n, tile_k), (None, None, None))
        one = cute.make_layout(1)
        a_to, a_from = cpasync.tma_partition(a_atom, 0, one, cute.group_modes(sa, 0, 2), cute.group_modes(ga, 0, 2))
        b_to, b_from = cpasync.tma_partition(b_atom, 0, one, cute.group_modes(sb, 0, 2), cute.group_modes(gb, 0, 2))
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        index, _, _ = cute.arch.block_idx()
        while index < self.tiles * self.batch:
            batch, row, col = self._tile_of(index)
            for k_tile in cutlass.range(self.k_tiles, unroll=1):
                ring.producer_acquire(state)
                full = ring.producer_get_barrier(state)
                cute.copy(
                    a_atom, a_from[(None, row, k_tile, batch)], a_to[(None, state.index)], tma_bar_ptr=full
                )
                cute.copy(
                    b_atom, b_from[(None, col, k_tile, batch)], b_to[(None, state.index)], tma_bar_ptr=full
                )
                state.advance()
            index += self.grid
        # Every load is issued: the next kernel's blocks may take the slots that blocks leave from now on.
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def _consume(self, ring, tiled_mma, sa, sb, direct, mirror, c, d, alpha, beta, gamma, thread):
        group = cute.arch.make_warp_uniform(thread // 128)
        mma = tiled_mma.get_slice(group * 128)
        ra = tiled_mma.make_fragment_A(mma.partition_A(sa))
        rb = tiled_mma.make_fragment_B(mma.partition_B(sb))
        # Coordinates want the thread, operands only its warpgroup.
        places = tiled_mma.get_slice(thread).partition_C(cute.make_identity_tensor(self.tile))
        acc = cute.make_rmem_tensor(places.shape, Float32)
        blocks = cute.size(ra, mode=[2])
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        release = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        index, _, _ = cute.arch.block_idx()
        while index < self.tiles * self.batch:
            batch, row, col = self._tile_of(index)
            acc.fill(0.0)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            ring.consumer_wait(read)
            warpgroup.fence()
            for block in cutlass.range_constexpr(blocks):
                at = (None, None, block, read.index)
                cute.gemm(tiled_mma, acc, ra[at], rb[at], acc)
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
            warpgroup.wait_group(0)
            ring.consumer_release(release)
            release.advance()
            row0, col0 = row * self.tile[0], col * self.tile[1]
            self.finish(acc, places, c, alpha, beta, gamma, batch, row0, col0)
            self.store(acc, tiled_mma, direct, mirror, d, batch, row0, col0, thread)
            index += self.grid

def _operand_layout(major, shape, dtype, stages):
    """Swizzled shared-memory ring of one operand: (rows, k, stage)."""
    contiguous = shape[1] if major == LayoutEnum.ROW_MAJOR else shape[0]
    atom = warpgroup.make_smem_layout_atom(hopper.get_smem_layout_atom(major, dtype, contiguous), dtype)
    order = (0, 1, 2) if major == LayoutEnum.ROW_MAJOR else (1, 0, 2)
    return cute.tile_to_shape(atom, (*shape, stages), order=order)
