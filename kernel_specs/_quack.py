"""What QuACK's symmetric product serves: its tiles, clusters and schedules as a space, and how one is launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem
from dmuon_tune.space import choice

SOURCE = __name__
MAX_CLUSTER = 4  # QuACK 0.5.0, gemm_sm90.py: total cluster size
CAPABILITY = (9, 0)


@dataclass(frozen=True)
class QuackConfig:
    """``tile_m``×``tile_n`` of the result a block, ``cluster_m``×``cluster_n`` blocks a cluster, whose tile is square.

    ``pingpong``: two warpgroups each with a tile of its own, in turn; else they share one. ``swizzle`` clusters are
    walked together, which keeps their operands in L2. The defaults are what QuACK itself runs on Hopper.
    """

    tile_m: int = choice(128, (64, 128, 192, 256, 320))
    tile_n: int = choice(256, (64, 128, 160, 192, 256))
    cluster_m: int = choice(2, (1, 2, 4))
    cluster_n: int = choice(1, (1, 2))
    pingpong: bool = choice(False, (False, True))
    swizzle: int = choice(8, (4, 8))


def refusal(problem: Problem, device: DeviceFingerprint) -> str | None:
    if device.arch != "sm_90":
        return f"QuACK's tiles are listed for Hopper (sm_90) alone, not for {device.arch}"
    if problem.op == "gram" and problem.epilogue != "none":
        return f"gram has no epilogue, asked {problem.epilogue!r}"
    if problem.epilogue not in ("none", "c"):
        return f"QuACK's symmetric product adds nothing but βC, asked epilogue {problem.epilogue!r}"
    if problem.n != problem.m:
        return f"a symmetric product has n = m; got m {problem.m}, n {problem.n}"
    for name in (problem.dtype, problem.out_dtype):
        if name not in ("float16", "bfloat16"):
            return f"QuACK multiplies and writes float16 and bfloat16, not {name}"
    for axis in ("m", "k") if problem.layout == "row" else ("m",):
        if getattr(problem, axis) % 8:
            return f"TMA moves rows of whole 16 bytes: {axis} must be a multiple of 8, not {getattr(problem, axis)}"
    return None


def illegality(problem: Problem, config: QuackConfig, device: DeviceFingerprint) -> str | None:
    """QuACK's own limits (gemm_sm90.py, tile_scheduler.py), which it states as assertions or not at all."""
    tile_m, tile_n, cluster_m, cluster_n = config.tile_m, config.tile_n, config.cluster_m, config.cluster_n
    if tile_m * cluster_m != tile_n * cluster_n:
        return f"a cluster's tile must be square, not {tile_m * cluster_m}×{tile_n * cluster_n}"
    if cluster_m * cluster_n > MAX_CLUSTER:
        return f"{cluster_m * cluster_n} blocks a cluster exceed {MAX_CLUSTER}"
    if config.pingpong and tile_n > {64: 256, 128: 208, 192: 128}.get(tile_m, 0):
        return f"a {tile_m}×{tile_n} tile is too large for one ping-pong warpgroup"
    if not config.pingpong and tile_n > {192: 256, 256: 128, 320: 160}.get(tile_m, 256):
        return f"a {tile_m}×{tile_n} tile is too large for the registers of its warpgroups"
    if tile_m in (192, 320) and _majors(problem)[1] == "n":
        return f"QuACK 0.5.0's compiler aborts on {tile_m}×{tile_n} tiles of a right operand whose rows are contiguous"
    clusters = -(-problem.m // (tile_m * cluster_m))
    if config.swizzle > 4 and clusters <= 4:
        return f"{clusters} clusters a side are fewer than a smaller swizzle walks together"
    return None


def program(problem: Problem, config: QuackConfig, device: DeviceFingerprint) -> Program:
    """A KernelSpec's build; QuACK itself is imported where it compiles."""
    return Program(problem, config, device.sm_count)


class Program:
    """QuACK's symmetric product for one problem's dtypes and layouts (its extents stay dynamic)."""

    def __init__(self, problem: Problem, config: QuackConfig, sm_count: int) -> None:
        self.problem, self.config, self.sm_count = problem, config, sm_count

    def compile(self) -> Any:
        """Compiled past QuACK's cache on disk, which knows nothing of this machine's users or of a read-only home."""
        from quack.cute_dsl_utils import torch2cute_dtype_map
        from quack.gemm_symmetric import _compile_gemm_symmetric

        dtypes = {str(torch_type).removeprefix("torch."): dsl for torch_type, dsl in torch2cute_dtype_map.items()}
        problem, config = self.problem, self.config
        operand, result = dtypes[problem.dtype], dtypes[problem.out_dtype]
        left, right = _majors(problem)
        return _compile_gemm_symmetric.__wrapped__(
            operand, operand, result, operand if problem.has_c else None, "n" if problem.has_c else None, result,
            left, right, "n", "m",
            (config.tile_m, config.tile_n), (config.cluster_m, config.cluster_n, 1), config.pingpong,
            True,  # persistent
            False,  # by a static schedule, as QuACK runs Hopper
            1,  # alpha is a float of each call
            1 if problem.has_c else 0,  # and beta
            CAPABILITY,
        )

    def launcher(self, compiled: Any) -> Callable[..., None]:
        """The op's launch, arguments in its order, on ``compiled``."""
        import cutlass
        import torch
        from quack.cute_dsl_utils import get_max_active_clusters
        from quack.gemm_act import GemmActMixin
        from quack.gemm_tvm_ffi_utils import make_scheduler_args

        size = self.config.cluster_m * self.config.cluster_n
        if torch.cuda.is_available():
            torch.empty(1, device="cuda")  # makes the context that the query needs
            clusters = get_max_active_clusters(size, CAPABILITY, torch.cuda.current_device())
        else:
            clusters = self.sm_count // size  # compiled for another machine, where nothing is launched
        schedule = make_scheduler_args(clusters, self.config.swizzle, None)
        rows, with_c, is_gram = self.problem.layout == "row", self.problem.has_c, self.problem.op == "gram"

        def multiply(a: Tensor, b: Tensor, c: Tensor | None, d: Tensor, alpha: float, beta: float | None) -> None:
            epilogue = GemmActMixin.EpilogueArguments(
                d.permute(2, 1, 0), None, alpha=cutlass.Float32(alpha),
                beta=None if beta is None else cutlass.Float32(beta), rounding_mode=None, sr_seed=None,
            )
            added = None if c is None else c.permute(1, 2, 0)
            compiled(a, b, d.permute(1, 2, 0), added, epilogue, schedule, None, None)

        def gram(x: Tensor, r: Tensor, alpha: float) -> None:
            operand = x.permute(1, 2, 0) if rows else x.permute(2, 1, 0)
            multiply(operand, operand, None, r, alpha, None)

        def symmetric(a: Tensor, b: Tensor, *rest: Any) -> None:
            c, d, alpha, beta = rest if with_c else (None, *rest, None)
            # A·B, not A·Bᵀ, as QuACK's own callers have it: equal for a symmetric B.
            left, right = (a.permute(1, 2, 0), b.permute(2, 1, 0)) if rows else (a.permute(2, 1, 0), b.permute(1, 2, 0))
            multiply(left, right, c, d, alpha, beta)

        return gram if is_gram else symmetric


def _majors(problem: Problem) -> tuple[str, str]:
    """The contiguous axes of the left (m, k) and the right (n, k) operand."""
    rows = problem.layout == "row"
    if problem.op == "gram":
        return ("k", "k") if rows else ("m", "n")
    return ("k", "n") if rows else ("m", "k")
