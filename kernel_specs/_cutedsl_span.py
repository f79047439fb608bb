# mypy: ignore-errors
"""Kernel body of a whole span for sm_90a in CuTe DSL: one cooperative launch of phases of symmetric products."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.utils import LayoutEnum

from dmuon_tune.problem import Problem

from ._cutedsl_epilogue import DTYPES, VALUES
from ._cutedsl_space import CHUNK, smem_bytes
from ._cutedsl_span_phases import Q, R, SpanPhases
from ._cutedsl_span_space import SpanConfig
from .gram_span import BARRIERS, arguments


class Program:
    """What the backend compiles: the entry point and stand-ins for its arguments but the stream."""

    def __init__(self, problem: Problem, config: SpanConfig, sm_count: int) -> None:
        self.problem, self.smem_bytes = problem, smem_bytes(config)
        self.body = GramSpan(problem, config, sm_count)
        self.entry = self.body.span

    def arguments(self) -> tuple:
        """Tensors contiguous and aligned to 16 bytes, in the op's order."""
        types = {**DTYPES, "float32": Float32, "int32": Int32}
        return tuple(
            cute.runtime.make_fake_compact_tensor(
                types[argument.dtype], argument.shape, stride_order=tuple(reversed(range(len(argument.shape)))),
                assumed_align=16,
            )
            for argument in arguments(self.problem)
        )


class GramSpan(SpanPhases):
    """Q of a span from R, for one problem and configuration, all extents fixed at compile time.

    Groups of blocks take the batch's matrices in rounds. In a block one warp fills a ring of shared-memory stages by
    TMA, and the consumers multiply and store, as in the symmetric product; they run from phase to phase, and only the
    warp that loads waits for the other blocks. C is taken from the operand's stages.
    """

    @cute.jit
    def span(
        self, r: cute.Tensor, coefficients: cute.Tensor, q: cute.Tensor, work: cute.Tensor, barriers: cute.Tensor,
        stream,
    ):
        rings = self._rings(LayoutEnum.ROW_MAJOR)
        mmas = self._mmas(LayoutEnum.ROW_MAJOR.sm90_mma_major_mode())
        self.swizzle = self._chunk_layout(self.dtype).inner
        store = cpasync.CopyBulkTensorTileS2GOp()
        r_view, q_view = self._view(r, self.matrices), self._view(q, self.matrices)
        work_view = self._view(work, self.batch)
        self._kernel(
            self._operand_copies(r_view, r_view, rings),
            self._operand_copies(work_view, work_view, rings),
            (*self._chunk_copy(store, work_view, self.dtype), *self._chunk_copy(store, q_view, self.dtype)),
            coefficients, barriers, *mmas, *rings,
        ).launch(
            grid=[self.flight * self.members * self.cluster, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1] if self.cluster > 1 else None,
            max_number_threads=[self.threads * self.blocks_per_sm, 1, 1],  # caps the registers
            min_blocks_per_mp=1,
            smem=self.smem_bytes,  # the DSL warns where it allocates more; the tests turn that into an error
            cooperative=True,  # blocks wait for each other: all of them are resident, or none
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def _kernel(
        self,
        r_copies: tuple,
        work_copies: tuple,
        stores: tuple,
        coefficients: cute.Tensor,
        barriers: cute.Tensor,
        tiled_mma: cute.TiledMma,
        chunk_mma: cute.TiledMma,
        a_smem: cute.ComposedLayout,
        b_smem: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        producer_warp = 4 * self.warpgroups
        if warp_index == producer_warp:
            for atom in (*r_copies[::2], *work_copies[::2], *stores[::2]):
                cpasync.prefetch_descriptor(atom)
        sa, sb, chunks, c_barriers, ring = self._shared_memory(a_smem, b_smem, thread)
        # Launched while the previous kernel of the stream drains: no global memory before this point.
        cute.arch.griddepcontrol_wait()

        place, _, _ = self._place()
        counter, shared = barriers.iterator + place * BARRIERS, (chunks, c_barriers)
        if warp_index >= producer_warp:
            if cutlass.const_expr(self.registers is not None):
                cute.arch.setmaxregister_decrease(self.registers[0])
            if warp_index == producer_warp:
                self._produce_span(ring, r_copies, work_copies, sa, sb, counter)
        else:
            if cutlass.const_expr(self.registers is not None):
                cute.arch.setmaxregister_increase(self.registers[1])
            self._consume_span(
                ring, tiled_mma, chunk_mma, sa, sb, shared, stores, coefficients, counter, thread
            )

    @cute.jit
    def _produce_span(self, ring, r_copies, work_copies, sa, sb, counter):
        place, member, rank = self._place()
        r_a, _, r_b, _ = r_copies
        work_a, _, work_b, _ = work_copies
        a_to, r_a_from, b_to, r_b_from = self._tiles(*r_copies[:2], sa, *r_copies[2:], sb)
        _, work_a_from, _, work_b_from = self._tiles(*work_copies[:2], sa, *work_copies[2:], sb)
        mask = self._sharers()
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        matrix, due = place, Int32(0)
        while matrix < self.matrices:
            for phase in cutlass.range(self.phases, unroll=1):
                products, index = self._products_of(phase), member
                if index < products * self.tiles:
                    self._await(counter, due)
                while index < products * self.tiles:
                    product, row, col = self._block_tile(index, rank)
                    a, b, _, _ = self._squares(phase, product)
                    k_tile, _ = self._k_order(col)
                    for _ in cutlass.range(self.k_tiles, unroll=1):
                        if k_tile == self.k_tiles:
                            k_tile = Int32(0)
                        ring.producer_acquire(state)
                        full = ring.producer_get_barrier(state)
                        to_a, to_b = a_to[(None, state.index)], b_to[(None, state.index)]
                        if phase < 2 and a == R:
                            cute.copy(r_a, r_a_from[(None, row, k_tile, matrix)], to_a, tma_bar_ptr=full)
                        else:
                            at = (None, row, k_tile, a * self.flight + place)
                            cute.copy(work_a, work_a_from[at], to_a, tma_bar_ptr=full)
                        if phase == 0:
                            at = (None, col, k_tile, matrix)
                            cute.copy(r_b, r_b_from[at], to_b, tma_bar_ptr=full, mcast_mask=mask)
                        else:
                            at = (None, col, k_tile, b * self.flight + place)
                            cute.copy(work_b, work_b_from[at], to_b, tma_bar_ptr=full, mcast_mask=mask)
                        state.advance()
                        k_tile += 1
                    index += self.members
                due += products * self.tile_count
            matrix += self.flight
        # Every load is issued: the next kernel's blocks may take the slots that blocks leave from now on.
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.cluster > 1):
            ring.producer_tail(state)  # the other block still signals to this one's barriers

    @cute.jit
    def _consume_span(self, ring, tiled_mma, chunk_mma, sa, sb, shared, stores, coefficients, counter, thread):
        group = cute.arch.make_warp_uniform(thread // 128)
        mma = tiled_mma.get_slice(group * 128)
        ra = tiled_mma.make_fragment_A(mma.partition_A(sa))
        rb = tiled_mma.make_fragment_B(mma.partition_B(sb))
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C(self.tile), Float32)
        place, member, rank = self._place()
        done, stored = Int32(0), Int32(0)  # tiles along k of the block's walk, chunks of this warpgroup
        matrix = place
        while matrix < self.matrices:
            for phase in cutlass.range(self.phases, unroll=1):
                products, index, finished = self._products_of(phase), member, Int32(0)
                scalars = self._coefficients(coefficients, phase)
                while index < products * self.tiles:
                    product, row, col = self._block_tile(index, rank)
                    _, _, d, is_q = self._squares(phase, product)
                    _, kept = self._k_order(col)
                    self._multiply(ring, tiled_mma, ra, rb, acc, done, self.k_tiles, kept)
                    done += self.k_tiles
                    warpgroup.wait_group(0)
                    self._add_c(acc, sa, scalars, group, row, col, done - kept, thread % 128)
                    for stage in cutlass.range(done - kept, done, unroll=1):
                        ring.consumer_release(self._stage(stage))
                    # The last Q is the result.
                    to_q = cutlass.Boolean(True) if self.steps == 1 else is_q and phase == self.phases - 1
                    at = d * self.flight + place
                    stored = self.store(
                        acc, chunk_mma, shared, stores[::2], stores[1::2], (phase == 0, place), scalars, group, rank,
                        False, row, col, (to_q, at, matrix), stored, thread % 128,
                    )
                    finished += 1
                    index += self.members
                if finished > 0:
                    self._count(counter, place, finished, thread)
            matrix += self.flight

    @cute.jit
    def _add_c(self, acc, sa, scalars, group, row, col, first, thread):
        """acc ← α·acc + β·C over the warpgroup's chunks, C's columns in the stages from ``first`` on."""
        alpha, beta, _ = scalars
        thread = _unknown(thread)
        for at in cutlass.range_constexpr(self.chunks):
            top, left = self.place(at, row, col, group)
            if self.stored(top, left):
                stage = (first + at % self.chunk_cols) % self.stages
                line = stage * self.tile[0] + top - row * self.tile[0]
                held = cute.make_rmem_tensor(VALUES, self.dtype)
                self._take_c(held, cute.recast_ptr(sa.iterator, None, self.dtype), line // CHUNK, thread)
                for v in cutlass.range_constexpr(VALUES):
                    acc[at * VALUES + v] = alpha * acc[at * VALUES + v] + beta * held[v].to(Float32)

    @cute.jit
    def _store_chunk(
        self, acc, chunk_mma, shared, atoms, tmas, first, scalars, group, buffer, phase, top, left, to, thread
    ):
        """A chunk of D and its mirror image; of the span's first product also of Q, which is D + γI."""
        raw, _ = shared
        _, _, gamma = scalars
        is_first, place = first
        thread = _unknown(thread)
        coordinates = self._coordinates(chunk_mma, thread)
        if cutlass.const_expr(self.steps == 1):
            if top == left:
                self._add_identity(acc, coordinates, gamma)
        if thread // 32 == 0:
            cute.arch.cp_async_bulk_wait_group(self.buffers - 1, read=True)
        self._sync(group)  # the buffer's chunk before has left
        self._fill(self._rounded(acc), chunk_mma, raw, group, buffer, top, left, thread)
        self._send(raw, atoms, tmas, group, buffer, top, left, to, thread)
        if cutlass.const_expr(self.steps > 1):
            if is_first:
                if top == left:
                    if thread // 32 == 0:
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                    self._sync(group)
                    self._add_identity(acc, coordinates, gamma)
                    self._fill(self._rounded(acc), chunk_mma, raw, group, buffer, top, left, thread)
                to_first = (cutlass.Boolean(False), Q * self.flight + place, place)
                self._send(raw, atoms, tmas, group, buffer, top, left, to_first, thread)

    @cute.jit
    def _send(self, raw, atoms, tmas, group, buffer, top, left, to, thread):
        """A chunk in its buffer to the result or to a square of ``work``."""
        to_q, at, matrix = to
        cute.arch.fence_proxy("async.shared", space="cta")
        self._sync(group)
        if thread // 32 == 0:
            if to_q:
                self._leave(raw, atoms[1], tmas[1], buffer, top, left, matrix)
            else:
                self._leave(raw, atoms[0], tmas[0], buffer, top, left, at)


@dsl_user_op
def _unknown(value: Int32, *, loc=None, ip=None) -> Int32:
    """The same value, of which the compiler knows nothing: what is made of it stays out of registers until then."""
    word = ir.IntegerType.get_signless(32)
    return Int32(
        llvm.inline_asm(
            word, [value.ir_value(loc=loc, ip=ip)], "mov.b32 $0, $1;", "=r,r", has_side_effects=True,
            is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
        )
    )
