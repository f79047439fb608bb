"""Programmatic dependent launch in Triton: a kernel's blocks start while the kernel before it ends."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def after_launches_before(OVERLAP: tl.constexpr):
    """Let the next kernel's blocks start when all of this one's have, and wait for the results of those before.

    A kernel that is launched to overlap must call this before it touches memory.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
