"""``gemm_symmetric`` by QuACK's symmetric product, a peer's kernel (Hopper; package quack-kernels)."""

from __future__ import annotations

from dmuon_tune.spec import KernelSpec

from ._quack import SOURCE, QuackConfig, illegality, program, refusal

KERNEL = KernelSpec("gemm_symmetric", "quack", QuackConfig, refusal, program, (__name__, SOURCE), illegality)
