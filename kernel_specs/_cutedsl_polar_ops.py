# mypy: ignore-errors
"""Instructions of sm_90a that the CuTe DSL kernel of whole recurrences needs and the DSL has no call for."""

from __future__ import annotations

from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def store_remote(address: Int32, value: Float32, *, loc=None, ip=None) -> None:
    """One float into another block's shared memory; ``address`` is a shared::cluster one."""
    operands = [address.ir_value(loc=loc, ip=ip), value.ir_value(loc=loc, ip=ip)]
    llvm.inline_asm(
        None, operands, "st.shared::cluster.f32 [$0], $1;", "r,f", has_side_effects=True, is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )


@dsl_user_op
def send(target: Int32, source: Int32, size: Int32, barrier: Int32, chosen: Int32, *, loc=None, ip=None) -> None:
    """``size`` bytes from this block's shared memory to another's; counted there by the barrier when they have come.

    By the thread that is ``chosen``: a predicate, as a branch would end the overlap with wgmma in flight.
    """
    operands = [value.ir_value(loc=loc, ip=ip) for value in (target, source, size, barrier, chosen)]
    copy = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    llvm.inline_asm(
        None, operands, "{ .reg .pred p; setp.ne.b32 p, $4, 0; @p " + copy + " }", "r,r,r,r,r,~{memory}",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )


@dsl_user_op
def expect(barrier: Int32, size: Int32, chosen: Int32, *, loc=None, ip=None) -> None:
    """Set a barrier of this block up for ``size`` bytes; by the thread that is ``chosen``, as in ``send``."""
    operands = [value.ir_value(loc=loc, ip=ip) for value in (barrier, size, chosen)]
    arrive = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
    llvm.inline_asm(
        None, operands, "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p " + arrive + " }", "r,r,r,~{memory}",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )


@dsl_user_op
def send_words(
    target: Int32, a: Int32, b: Int32, c: Int32, d: Int32, barrier: Int32, chosen: Int32, *, loc=None, ip=None
) -> None:
    """16 bytes from registers to another block's shared memory; counted there by the barrier when they have come.

    By the threads that are ``chosen``, as in ``send``.
    """
    operands = [value.ir_value(loc=loc, ip=ip) for value in (target, a, b, c, d, barrier, chosen)]
    store = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [$0], {$1, $2, $3, $4}, [$5];"
    llvm.inline_asm(
        None, operands, "{ .reg .pred p; setp.ne.b32 p, $6, 0; @p " + store + " }", "r,r,r,r,r,r,r,~{memory}",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )


@dsl_user_op
def select(chosen: Int32, one: Float32, other: Float32, *, loc=None, ip=None) -> Float32:
    """``one`` where chosen, without a branch."""
    operands = [value.ir_value(loc=loc, ip=ip) for value in (one, other, chosen)]
    return Float32(
        llvm.inline_asm(
            ir.F32Type.get(), operands, "{ .reg .pred p; setp.ne.b32 p, $3, 0; selp.f32 $0, $1, $2, p; }",
            "=f,f,f,r", has_side_effects=False, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc, ip=ip,
        )
    )


def _store_four(instruction, address, words, loc, ip):
    operands = [value.ir_value(loc=loc, ip=ip) for value in (address, *words)]
    llvm.inline_asm(
        None, operands, f"{instruction} [$0], {{$1, $2, $3, $4}};", "r,r,r,r,r,~{memory}",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )


def _load_four(instruction, address, loc, ip):
    word = ir.IntegerType.get_signless(32)
    found = llvm.inline_asm(
        llvm.StructType.get_literal([word] * 4), [address.ir_value(loc=loc, ip=ip)],
        f"{instruction} {{$0, $1, $2, $3}}, [$4];", "=r,=r,=r,=r,r,~{memory}",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )
    return tuple(Int32(llvm.extractvalue(word, found, [i], loc=loc, ip=ip)) for i in range(4))


@dsl_user_op
def store_squares(address: Int32, a: Int32, b: Int32, c: Int32, d: Int32, *, loc=None, ip=None) -> None:
    """Four 8×8 squares of 16-bit elements, one in each register of a warp; a lane's ``address`` is of one line."""
    _store_four("stmatrix.sync.aligned.m8n8.x4.shared.b16", address, (a, b, c, d), loc, ip)


@dsl_user_op
def load_squares(address: Int32, *, loc=None, ip=None):
    """The inverse of ``store_squares``: four registers."""
    return _load_four("ldmatrix.sync.aligned.m8n8.x4.shared.b16", address, loc, ip)


@dsl_user_op
def pack(low: Float32, high: Float32, *, loc=None, ip=None) -> Int32:
    """Two values rounded to fp16, in one register."""
    operands = [value.ir_value(loc=loc, ip=ip) for value in (high, low)]
    word = ir.IntegerType.get_signless(32)
    return Int32(
        llvm.inline_asm(
            word, operands, "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", has_side_effects=False, is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
        )
    )


@dsl_user_op
def unpack(word: Int32, *, loc=None, ip=None):
    """The two fp16 values of a register in fp32."""
    single = ir.F32Type.get()
    found = llvm.inline_asm(
        llvm.StructType.get_literal([single] * 2), [word.ir_value(loc=loc, ip=ip)],
        "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }", "=f,=f,r",
        has_side_effects=False, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )
    return tuple(Float32(llvm.extractvalue(single, found, [i], loc=loc, ip=ip)) for i in range(2))


@dsl_user_op
def store_words(address: Int32, a: Int32, b: Int32, c: Int32, d: Int32, *, loc=None, ip=None) -> None:
    """16 bytes to shared memory."""
    _store_four("st.shared.v4.b32", address, (a, b, c, d), loc, ip)


@dsl_user_op
def load_words(address: Int32, *, loc=None, ip=None):
    """16 bytes from shared memory, in four registers."""
    return _load_four("ld.shared.v4.b32", address, loc, ip)


@dsl_user_op
def store_half(address: Int32, word: Int32, *, loc=None, ip=None) -> None:
    """The lower 16 bits of a register to shared memory."""
    operands = [value.ir_value(loc=loc, ip=ip) for value in (address, word)]
    llvm.inline_asm(
        None, operands, "{ .reg .b16 l, h; mov.b32 {l, h}, $1; st.shared.b16 [$0], l; }", "r,r,~{memory}",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )


@dsl_user_op
def load_half(address: Int32, *, loc=None, ip=None) -> Float32:
    """One fp16 value of shared memory in fp32."""
    return Float32(
        llvm.inline_asm(
            ir.F32Type.get(), [address.ir_value(loc=loc, ip=ip)],
            "{ .reg .b16 l; ld.shared.b16 l, [$1]; cvt.f32.f16 $0, l; }", "=f,r,~{memory}",
            has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
        )
    )
