"""The methods that bench_ns compares, the inputs it checks them on, and their float64 references."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from dmuon_tune.backends import is_peer
from dmuon_tune.cache import CacheEntry, Layers
from dmuon_tune.coefficients import CoefficientSet
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, groups
from dmuon_tune.runtime import GramNewtonSchulz
from dmuon_tune.words import counted

STEPS, RESTARTS = 5, (2,)
PEER_VERSION = "0.1.6"
INPUTS = ("gaussian", "lowrank", "spike", "cond1e6", "tiny", "large")

Call = Callable[[Tensor], Tensor]


class Refused(Exception):
    """A method that cannot run here; the text says why, or what to install."""


@dataclass(frozen=True)
class Calls:
    """``captured`` has its work recorded into a graph, ``eager`` is what a user calls; ``note`` says what runs."""

    captured: Call
    eager: Call
    note: str = ""
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Setting:
    """What all methods share: the coefficients and the chain's dtype; ``layers`` are the tuned method's caches."""

    coefficients: CoefficientSet
    dtype: str
    layers: Layers

    @property
    def arithmetic(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


class NoLayers(Layers):
    """Caches of a machine where nothing was tuned."""

    _layers = []  # type: ignore[assignment]


class OwnLayers(Layers):
    """This machine's caches without what other projects' kernels reached."""

    def entries_by_layer(
        self, problem: Problem | None, device: DeviceFingerprint | None
    ) -> Iterator[tuple[str, list[CacheEntry]]]:
        for label, entries in super().entries_by_layer(problem, device):
            yield label, [entry for entry in entries if not is_peer(entry.key.toolchain.backend)]


def normalized(u: Tensor, dtype: torch.dtype, factor: float) -> Tensor:
    """U/(factor·‖U‖_F) by matrix, divided in fp32 (float64 for float64), as a wide matrix."""
    wide = u if u.shape[-2] <= u.shape[-1] else u.mT
    precise = wide.double() if dtype == torch.float64 else wide.float()
    return (precise / (torch.linalg.vector_norm(precise, dim=(-2, -1), keepdim=True) * factor + 1e-7)).to(dtype)


def plain_ns(u: Tensor, coefficients: CoefficientSet, dtype: torch.dtype) -> Tensor:
    """X ← aX + (bA + cA²)X with A = XXᵀ, by torch.baddbmm."""
    x = normalized(u, dtype, coefficients.norm_factor)
    for a, b, c in coefficients.take(STEPS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if u.shape[-2] <= u.shape[-1] else x.mT


def gram_ns(u: Tensor, coefficients: CoefficientSet, dtype: torch.dtype) -> Tensor:
    """The Gram form with a restart, by torch.baddbmm: full products, no symmetry."""
    steps = coefficients.take(STEPS)
    x = normalized(u, dtype, coefficients.norm_factor)
    gram = q = None
    for step, (a, b, c) in enumerate(steps):
        if step in (0, *RESTARTS):
            x = x if q is None else torch.bmm(q, x)
            gram, q = torch.bmm(x, x.mT), None
        assert gram is not None
        z = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        if q is None:
            q = z.clone()
            q.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            q = torch.baddbmm(q, q, z, beta=a)
        if step + 1 < len(steps) and step + 1 not in RESTARTS:
            moved = torch.baddbmm(gram, gram, z, beta=a)
            gram = torch.baddbmm(moved, moved, z, beta=a)
    x = torch.bmm(q, x)
    return x if u.shape[-2] <= u.shape[-1] else x.mT


def _ours(setting: Setting, layers: Layers, group: Group, device: torch.device) -> Calls:
    """The runtime twice: a call that replays a graph of its own is no work to capture."""
    logging.getLogger("dmuon_tune.runtime").setLevel(logging.ERROR)  # what is untuned stands in the note
    fixed: dict[str, Any] = {
        "coefficients": setting.coefficients, "steps": STEPS, "restarts": RESTARTS, "dtype": setting.dtype,
        "layers": layers, "on_miss": "heuristic",
    }
    launching = GramNewtonSchulz(**fixed, graphs=False)
    plan = launching.plan_for(groups([(group.rows, group.cols)] * group.batch), device)
    replaying = GramNewtonSchulz(**fixed, plan=plan)
    rows = plan.rows()
    forms = ", ".join(sorted({f"{row['form']} form" for row in rows}))
    used = sorted({f"{row['kernel']} ({row['origin']})" for row in rows})
    missing = f"; {len(plan.missing)} of {counted(len(rows), 'product')} untuned" if plan.missing else ""
    return Calls(launching, replaying, "; ".join([f"{forms}{missing}", *plan.failures]), tuple(used))


def tuned(setting: Setting, group: Group, device: torch.device) -> Calls:
    return _ours(setting, setting.layers, group, device)


def untuned(setting: Setting, group: Group, device: torch.device) -> Calls:
    return _ours(setting, NoLayers({}), group, device)


def plain(setting: Setting, group: Group, device: torch.device) -> Calls:
    def call(u: Tensor) -> Tensor:
        return plain_ns(u, setting.coefficients, setting.arithmetic).to(u.dtype)

    return Calls(call, call)


def gram(setting: Setting, group: Group, device: torch.device) -> Calls:
    def call(u: Tensor) -> Tensor:
        return gram_ns(u, setting.coefficients, setting.arithmetic).to(u.dtype)

    return Calls(call, call)


def compiled(setting: Setting, group: Group, device: torch.device) -> Calls:
    call: Call = torch.compile(gram(setting, group, device).captured, fullgraph=True, dynamic=False)
    return Calls(call, call)


def peer(setting: Setting, group: Group, device: torch.device) -> Calls:
    """The package as it is: its passes fused by torch.compile; eager in its own default mode, which replays graphs."""
    try:
        found = version("gram-newton-schulz")
    except PackageNotFoundError:
        raise Refused(f"not installed; pip install gram-newton-schulz=={PEER_VERSION} (extra [bench])") from None
    if device.type != "cuda":
        raise Refused(f"gram-newton-schulz {found} runs its kernels on a GPU alone")
    from gram_newton_schulz import GramNewtonSchulz as Peer

    factor = setting.coefficients.norm_factor
    (a, b, c), *rest = setting.coefficients.take(STEPS)
    steps = [[a / factor, b / factor**3, c / factor**5], *map(list, rest)]  # it norms without a factor
    fixed: dict[str, Any] = {"ns_coefficients": steps, "gram_newton_schulz_reset_iterations": list(RESTARTS)}
    captured = Peer(**fixed, compile_kwargs={"fullgraph": True, "dynamic": False})
    return Calls(captured, Peer(**fixed), f"version {found}")


def dion(setting: Setting, group: Group, device: torch.device) -> Calls:
    """Dion's symmetric products in Triton, bf16; its autotuner takes minutes where nothing is in Triton's cache."""
    if setting.coefficients.name != "you" or STEPS != 5:
        raise Refused(f"has five steps of the YOU coefficients built in, asked {setting.coefficients.name}")
    try:
        from dion.newton_schulz_triton import newton_schulz_triton
    except ModuleNotFoundError:
        raise Refused("not installed; pip install git+https://github.com/microsoft/dion") from None
    if device.type != "cuda":
        raise Refused("runs its kernels on a GPU alone")
    return Calls(call := lambda u: newton_schulz_triton(u).to(u.dtype), call)


def methods(library: str) -> dict[str, tuple[str, Callable[[Setting, Group, torch.device], Calls]]]:
    """Key → (label, maker); ``library`` names the vendor's."""
    return {
        "tuned": ("ours, tuned", tuned),
        "untuned": ("ours, untuned", untuned),
        "plain": (f"plain NS, {library}", plain),
        "gram": (f"Gram NS, {library}", gram),
        "compiled": ("Gram NS, torch.compile", compiled),
        "peer": ("gram-newton-schulz", peer),
        "dion": ("plain NS, Dion's Triton", dion),
    }


def make_input(kind: str, group: Group, device: torch.device, seed: int) -> Tensor:
    """(batch, rows, cols) in fp32: the spectra and scales that separate stable recurrences from fragile ones."""
    rng = torch.Generator(device=device).manual_seed(seed)

    def gaussian(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(group.batch, rows, cols, device=device, dtype=dtype, generator=rng)

    m, n = group.m, group.n
    if kind == "lowrank":
        rank = max(1, m // 16)
        wide = gaussian(m, rank) @ gaussian(rank, n) / rank**0.5 + 1e-4 * gaussian(m, n)
    elif kind == "spike":
        wide = gaussian(m, n) + 1e3 * gaussian(m, 1) @ gaussian(1, n)
    elif kind == "cond1e6":
        left, right = (torch.linalg.qr(gaussian(size, m, torch.float64)).Q for size in (m, n))
        values = torch.logspace(0, -6, m, device=device, dtype=torch.float64)
        wide = ((left * values) @ right.mT).float()
    else:
        wide = {"gaussian": 1.0, "tiny": 1e-9, "large": 1e5}[kind] * gaussian(m, n)
    return wide if group.rows <= group.cols else wide.mT.contiguous()


def polar(u: Tensor) -> Tensor:
    """The polar factor in float64 by an eigendecomposition of the short side's Gram matrix."""
    wide = u.double() if u.shape[-2] <= u.shape[-1] else u.double().mT
    wide = wide / torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True)
    values, vectors = torch.linalg.eigh(wide @ wide.mT)
    factor = (vectors * values.clamp_min(1e-300).rsqrt()[..., None, :]) @ (vectors.mT @ wide)
    return factor if u.shape[-2] <= u.shape[-1] else factor.mT


def recurrence(u: Tensor, coefficients: CoefficientSet) -> Tensor:
    """The same steps in float64; scaled first, so that the ε beside the norm leaves small inputs alone."""
    scaled = u.double() / torch.linalg.vector_norm(u.double(), dim=(-2, -1), keepdim=True)
    return plain_ns(scaled, coefficients, torch.float64)


def relative(out: Tensor, reference: Tensor) -> float:
    """Frobenius norm of the difference over the reference's, over the whole batch."""
    return float(torch.linalg.vector_norm(out.double() - reference) / torch.linalg.vector_norm(reference))
