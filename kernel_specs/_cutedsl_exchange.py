# mypy: ignore-errors
"""How blocks that share a tile's k add their sums in the CuTe DSL symmetric product: over distributed shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from ._cutedsl_epilogue import VALUES
from ._cutedsl_walk import TileWalk

SUMS_BARRIER = 6  # named barrier of all consumer warpgroups


class SumExchange(TileWalk):
    """Each block leaves the chunks that others store in its own ring of stages, and reads theirs in a fixed order."""

    @cute.jit
    def _stand_by(self):
        """For threads with no part in the exchange of sums: a cluster's barrier counts them too."""
        if cutlass.const_expr(self.split > 1):
            if self._shares():
                cute.arch.cluster_arrive()

    @cute.jit
    def _end_sharing(self):
        """Stay until the others have read this block's sums."""
        if cutlass.const_expr(self.split > 1):
            if self._shares():
                cute.arch.cluster_wait()

    @cute.jit
    def _exchange(self, acc, sa, group, rank, row, col, thread):
        """Sums of a tile's k parts: each block adds the others' to the chunks that it stores, in a fixed order."""
        lane = thread % 128
        # (4 values, thread, vector, chunk): the ring's stages, all read by now.
        sums = cute.make_tensor(
            cute.recast_ptr(sa.iterator, None, Float32),
            cute.make_layout(
                (4, 128, VALUES // 4, self.tile_warpgroups * self.chunks), stride=(1, 4, 512, 128 * VALUES)
            ),
        )
        cute.arch.barrier(barrier_id=SUMS_BARRIER, number_of_threads=128 * self.warpgroups)
        for at in cutlass.range_constexpr(self.chunks):
            top, left = self.place(at, row, col, group)
            if self.stored(top, left) and not self.owned(at, group, rank, True):
                values = cute.make_tensor(acc.iterator + at * VALUES, cute.make_layout((4, VALUES // 4)))
                for v in cutlass.range_constexpr(VALUES // 4):
                    cute.autovec_copy(values[(None, v)], sums[(None, lane, v, self.chunk(at, group))])
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        for at in cutlass.range_constexpr(self.chunks):
            top, left = self.place(at, row, col, group)
            if self.stored(top, left) and self.owned(at, group, rank, True):
                values = cute.make_tensor(acc.iterator + at * VALUES, cute.make_layout((4, VALUES // 4)))
                for other in cutlass.range_constexpr(1, self.split):
                    peer = (rank + other) % self.split
                    for v in cutlass.range_constexpr(VALUES // 4):
                        theirs = _load_peer(sums[(None, lane, v, self.chunk(at, group))].iterator, peer)
                        for e in cutlass.range_constexpr(4):
                            values[(e, v)] = values[(e, v)] + theirs[e]
        cute.arch.cluster_arrive()


@dsl_user_op
def _load_peer(pointer, peer, *, loc=None, ip=None):
    """Four fp32 values from the same place in another block's shared memory."""
    address = cute.arch.map_dsmem_ptr(pointer, peer, loc=loc, ip=ip).toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)
    f32 = ir.F32Type.get()
    loaded = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * 4),
        [address],
        "ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [$4];",
        "=f,=f,=f,=f,r",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return [Float32(llvm.extractvalue(f32, loaded, [i], loc=loc, ip=ip)) for i in range(4)]
