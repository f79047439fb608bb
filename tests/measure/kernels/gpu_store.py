"""Writes to an address that is nobody's, on a GPU, whose context every later launch then fails in."""

import triton
import triton.language as tl
from gram_variant import variant


@triton.jit
def _store(address):
    tl.store(address.to(tl.pointer_type(tl.float32)), 0.0)


KERNEL = variant(__name__, lambda x, r, alpha: _store[(1,)](16))  # in the first page: at 2**40 an H200 did not fault
