"""Muon: the optimizer for one process; matrices by Newton–Schulz on tuned kernels, the rest by PyTorch's AdamW."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from dmuon_tune import checks
from dmuon_tune.cache import Layers
from dmuon_tune.coefficients import DEFAULT_COEFFICIENTS
from dmuon_tune.errors import UsageError
from dmuon_tune.matrices import select, unmatched
from dmuon_tune.recipe import DEFAULT_RESTARTS, DEFAULT_STEPS, Group
from dmuon_tune.words import shown

from .execution import Momentum
from .newton_schulz import Coefficients, GramNewtonSchulz, cut_batch
from .plan import Plan

# Update scale by (rows, cols) of the stored parameter, out × in.
SCALES: dict[str, Callable[[int, int], float]] = {
    "jordan": lambda rows, cols: math.sqrt(max(1.0, rows / cols)),  # kellerjordan.github.io/posts/muon
    "moonlight": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),  # arXiv 2502.16982: AdamW's update RMS
    "spectral": lambda rows, cols: math.sqrt(rows / cols),  # arXiv 2310.17813: the muP scale
    "none": lambda rows, cols: 1.0,
}
FUSED_DEVICES = ("cuda", "cpu")

logger = getLogger("dmuon_tune.runtime")


class Muon(Optimizer):
    """W ← (1 − lr·λ)W − lr·s·polar(U), with M ← μM + G and U = G + μM (Nesterov) or M.

    ``params`` is a module, whose hidden matrices (``matrices.select`` with ``include``/``exclude``) go to Muon and the
    rest to AdamW with the ``adamw_*`` options; or parameters and parameter groups as for any optimizer, where a
    group's ``use_muon`` (default True) says which it is and its own options override. A 3-D parameter is a batch of
    matrices. ``scale`` is s: ``jordan``, ``moonlight``, ``spectral`` or ``none``. ``coefficients``, ``steps``,
    ``restarts``, ``ns_dtype``, ``eps`` and ``graphs`` are :class:`GramNewtonSchulz`'s. Matrices of equal shape whose
    momentum is made alike are orthogonalized together, whatever their group. Kernels are resolved once, at the first
    step or by :meth:`plan`, from the caches in ``layers`` (default: those of this machine). Raises UsageError for
    options or parameters it cannot use, by name.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        scale: str = "jordan",
        coefficients: Coefficients = DEFAULT_COEFFICIENTS,
        steps: int = DEFAULT_STEPS,
        restarts: Sequence[int] = DEFAULT_RESTARTS,
        ns_dtype: str | torch.dtype | None = None,
        eps: float = 0.0,
        graphs: bool = True,
        adamw_lr: float = 3e-4,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.0,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        layers: Layers | None = None,
        on_miss: str | None = None,
    ) -> None:
        self._newton_schulz = GramNewtonSchulz(
            coefficients, steps, restarts, ns_dtype, layers=layers, on_miss=on_miss, eps=eps, graphs=graphs
        )
        self._adamw_options = {
            "lr": adamw_lr, "betas": adamw_betas, "eps": adamw_eps, "weight_decay": adamw_weight_decay,
        }
        _check_adamw(self._adamw_options, "adamw_")
        self._adamw: AdamW | None = None
        self._planned = False
        defaults = {
            "use_muon": True, "lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay,
            "scale": scale,
        }
        for option, patterns in (("include", include), ("exclude", exclude)):
            checks.strings(option, patterns, "patterns")
        groups = _groups_of(params, include, exclude) if isinstance(params, nn.Module) else params
        super().__init__(groups, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; with ``use_muon`` False its missing options are the constructor's ``adamw_*``."""
        if not isinstance(param_group, dict):
            raise UsageError(f"a parameter group must be a dict, not {type(param_group).__name__}")
        group = dict(param_group)
        checks.flag(f"group {len(self.param_groups)}: use_muon", group.setdefault("use_muon", True))
        if not group["use_muon"]:
            group = {**self._adamw_options, **group}
        super().add_param_group(group)
        added = self.param_groups[-1]
        try:
            _check_group(added, len(self.param_groups) - 1)
        except UsageError:
            self.param_groups.pop()
            raise
        if not added["use_muon"]:
            for name in ("momentum", "nesterov", "scale"):
                added.pop(name, None)
            # PyTorch's load_state_dict reads this key to keep AdamW's step counter on the parameter's device.
            added.setdefault("fused", all(p.device.type in FUSED_DEVICES for p in added["params"]))
        self._adamw = None
        self._planned = False

    def plan(self) -> tuple[Plan, ...]:
        """Resolve the kernels of every matrix now, one plan a device; otherwise the first step does it."""
        counts: Counter[tuple[Any, ...]] = Counter()
        for group in self._muon_groups():
            for p in group["params"]:
                counts[_kind(group, p, p.dtype)] += p.shape[0] if p.ndim == 3 else 1
        wanted: dict[torch.device, list[tuple[Group, tuple[Any, ...]]]] = {}
        for kind, count in counts.items():
            device, _, _, rows, cols, _, _ = kind
            wanted.setdefault(device, []).extend((batch, kind) for _, batch in cut_batch(count, rows, cols))
        plans = []
        for device, found in wanted.items():
            plans.append(self._newton_schulz.plan_for([batch for batch, _ in found], device))
            for batch, (_, dtype, gradient_dtype, _, _, mode, _) in found:
                self._newton_schulz.prepare(batch, device, gradient_dtype, mode, dtype)
        self._planned = True
        return tuple(plans)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; ``closure`` re-evaluates the model and returns the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._planned:
            self.plan()
        self._muon_step()
        self._adamw_step()
        return loss

    def _muon_groups(self) -> Iterator[dict[str, Any]]:
        return (group for group in self.param_groups if group["use_muon"])

    def _muon_step(self) -> None:
        batches: dict[tuple[Any, ...], _Batch] = {}
        for index, group in enumerate(self.param_groups):
            if not group["use_muon"]:
                continue
            lr = float(group["lr"])
            decay = 1 - lr * float(group["weight_decay"])
            for position, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                buffer = self._buffer(group, index, position)
                batch = batches.setdefault(_kind(group, p, p.grad.dtype), _Batch([], [], [], []))
                batch.add(p, p.grad, buffer, (decay, lr * SCALES[group["scale"]](p.shape[-2], p.shape[-1])))
        for (*_, mode, mu), batch in batches.items():
            momentum = Momentum(mode, tuple(batch.momenta), mu)
            self._newton_schulz.step(batch.weights, batch.gradients, momentum, batch.rates)

    def _buffer(self, group: dict[str, Any], index: int, position: int) -> Tensor:
        """The momentum of a parameter that has a gradient."""
        p = group["params"][position]
        if p.grad.layout != torch.strided:
            raise UsageError(f"{_name(group, index, position)}: Muon needs dense gradients; use AdamW for it")
        if "momentum_buffer" not in self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.contiguous_format)
        buffer: Tensor = self.state[p]["momentum_buffer"]
        return buffer

    def _adamw_step(self) -> None:
        groups = [group for group in self.param_groups if not group["use_muon"]]
        if not groups:
            return
        if self._adamw is None:
            self._adamw = AdamW(groups)  # fills the groups' missing AdamW options in place
        self._adamw.param_groups = groups
        self._adamw.state = self.state
        self._adamw.step()

    def __getstate__(self) -> dict[str, Any]:
        kept = {"_newton_schulz": self._newton_schulz, "_adamw_options": self._adamw_options}
        return {**super().__getstate__(), **kept, "_adamw": None, "_planned": False}


@dataclass
class _Batch:
    """Equal matrices of one step, one entry each: weights, gradients, momentum buffers, (decay, rate)."""

    weights: list[Tensor]
    gradients: list[Tensor]
    momenta: list[Tensor]
    rates: list[tuple[float, float]]

    def add(self, p: Tensor, gradient: Tensor, momentum: Tensor, rate: tuple[float, float]) -> None:
        """A parameter's matrices."""
        if p.ndim == 2:
            self.weights.append(p)
            self.gradients.append(gradient)
            self.momenta.append(momentum)
            self.rates.append(rate)
            return
        self.weights += p.unbind()
        self.gradients += gradient.unbind()
        self.momenta += momentum.unbind()
        self.rates += [rate] * len(p)


def _kind(group: dict[str, Any], p: Tensor, gradient_dtype: torch.dtype) -> tuple[Any, ...]:
    """What a parameter's matrices must share to run together: device, dtypes, rows, cols, momentum's mode and μ."""
    return p.device, p.dtype, gradient_dtype, *p.shape[-2:], "n" if group["nesterov"] else "m", float(group["momentum"])


def _groups_of(module: nn.Module, include: Sequence[str], exclude: Sequence[str]) -> list[dict[str, Any]]:
    """A module's parameters as a Muon group and an AdamW group, each (name, parameter) in the module's order."""
    named = {
        name: p for name, p in module.named_parameters() if p.requires_grad or p.is_floating_point()
    }
    selection = select(((name, tuple(p.shape)) for name, p in named.items()), include, exclude)
    for pattern in unmatched([*include, *exclude], named):
        logger.warning("pattern %r matches no parameter of %s", pattern, type(module).__name__)
    matrices = [(matrix.name, named[matrix.name]) for matrix in selection.matrices]
    rest = [(left.name, named[left.name]) for left in selection.left_out]
    groups = [{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}]
    found = [group for group in groups if group["params"]]
    if not found:
        raise UsageError(f"{type(module).__name__} has no parameters to optimize")
    return found


def _name(group: dict[str, Any], index: int, position: int) -> str:
    names = group.get("param_names")
    shape = "x".join(str(extent) for extent in group["params"][position].shape)
    return f"parameter {names[position]!r}" if names else f"parameter {position} of group {index} ({shape})"


def _check_adamw(options: dict[str, Any], where: str) -> None:
    """UsageError for AdamW's lr, betas, eps, weight_decay; ``where`` stands in front of the option's name."""
    for option in ("lr", "weight_decay", "eps"):
        checks.number(where + option, options[option])
    betas = options["betas"]
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise UsageError(f"{where}betas must be two numbers in [0, 1), not {shown(betas)}")
    for place, beta in enumerate(betas):
        checks.number(f"{where}betas[{place}]", beta, below=1.0)


def _check_group(group: dict[str, Any], index: int) -> None:
    where = f"group {index}: "
    if not group["use_muon"]:
        _check_adamw(group, where)
        return
    for option in ("lr", "weight_decay"):
        checks.number(where + option, group[option])
    checks.number(f"{where}momentum", group["momentum"], below=1.0)
    checks.flag(f"{where}nesterov", group["nesterov"])
    checks.one_of("scale", group["scale"], SCALES, where)
    for position, p in enumerate(group["params"]):
        if not p.is_floating_point():
            raise UsageError(f"{_name(group, index, position)}: Muon needs real floating-point weights, not {p.dtype}")
        if p.ndim not in (2, 3) or 0 in p.shape:
            raise UsageError(
                f"{_name(group, index, position)}: Muon takes matrices and 3-D batches of them; "
                "put it in a group with use_muon=False"
            )
