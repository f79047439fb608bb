"""Muon: the optimizer, of one process or many; matrices by Newton–Schulz on tuned kernels, the rest by AdamW."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from dmuon_tune import checks
from dmuon_tune.cache import Layers
from dmuon_tune.coefficients import DEFAULT_COEFFICIENTS
from dmuon_tune.errors import UsageError
from dmuon_tune.recipe import DEFAULT_STEPS, Group
from dmuon_tune.words import shown

from .batches import Kind, Setting, are_finite
from .blocks import Blocks, Split, blocks_of
from .checkpoints import restore
from .distributed.clipping import check_norm, clip_by_last_
from .eager import EagerAdamW, EagerOptimizer, lay_state, uncompiled
from .mode import choice_of, gather_for
from .newton_schulz import Coefficients, GramNewtonSchulz, cut_batch
from .ownership_options import OwnershipOptions
from .parameters import (
    FIXED_OPTIONS,
    MATRIX_OPTIONS,
    check_adamw,
    check_fixed,
    check_last_group,
    check_options,
    dtype_of,
    groups_of,
    name_of,
    print_once,
    splits_of,
    unusable,
    warn_idle,
)
from .phases import phase
from .plan import Plan
from .report import Direction, Report, directions_of, report
from .steady import Found, Layouts, sorted_batches
from .trial import form_of, try_adamw

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .distributed.exchange import Traffic
    from .distributed.gather import Gather
    from .ownership import Assignment

FUSED_DEVICES = ("cuda", "cpu")


class Muon(EagerOptimizer):
    """W ← (1 − lr·λ)W − lr·s·polar(U), with M ← μM + G and U = G + μM (Nesterov) or M.

    ``params`` is a module, whose hidden matrices (``matrices.select`` with ``include``/``exclude``) go to Muon and the
    rest to AdamW with the ``adamw_*`` options; or parameters and parameter groups as for any optimizer, where a
    group's ``use_muon`` (default True) says which it is and its own options override. A 3-D parameter is a batch of
    matrices. ``scale`` is s: ``jordan``, ``moonlight``, ``spectral`` or ``none``. ``coefficients``, ``steps``,
    ``restarts``, ``ns_dtype``, ``eps`` and ``graphs`` are :class:`GramNewtonSchulz`'s. docs/optimizer.md has every
    option. Matrices of equal shape whose momentum is made alike are orthogonalized together, whatever their group.
    Kernels are resolved once, at the first step or by :meth:`plan`, from the caches in ``layers`` (default: those of
    this machine). Raises UsageError for options or parameters it cannot use, by name.

    ``momentum_form``: ``accumulate``, or ``ema``: M ← μM + (1 − μ)G and U = (1 − μ)G + μM. ``cautious``: λ is for those
    entries alone that the update moves towards 0. ``splits``: pattern → sizes of rows, or :class:`Split`, of parameters
    that are several matrices (in a group: ``split``, ``split_dim``). ``flatten``: patterns of convolutions to be taken
    as matrices (in a group: True). ``momentum_dtype``: of the momentum (default: the parameter's).
    ``skip_nonfinite``: a step with NaN or inf in any gradient changes nothing; this waits for the device.
    ``verbose``: print a module's table of parameters to stderr.

    Where parameters are DTensors (FSDP2, HSDP, tensor parallelism), or ``params`` is a DistributedDataParallel, ranks
    divide the matrices: ``process_group``, ``bucket_bytes``, ``timeout``, ``profile`` and ``ownership`` are in
    docs/distributed.md.
    ``mode``: ``auto``, as the parameters are; ``local``, ``gather`` or ``dedicated``: that, or UsageError.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        scale: str = "jordan",
        coefficients: Coefficients = DEFAULT_COEFFICIENTS,
        steps: int = DEFAULT_STEPS,
        restarts: Sequence[int] | None = None,
        ns_dtype: str | torch.dtype | None = None,
        eps: float = 0.0,
        graphs: bool = True,
        adamw_lr: float | Tensor = 3e-4,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.0,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        layers: Layers | None = None,
        on_miss: str | None = None,
        *,
        mode: str = "auto",
        momentum_form: str = "accumulate",
        cautious: bool = False,
        maximize: bool = False,
        splits: Mapping[str, Sequence[int] | Split] | None = None,
        flatten: Sequence[str] = (),
        momentum_dtype: str | torch.dtype | None = None,
        skip_nonfinite: bool = False,
        verbose: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_bytes: int = 2**28,
        timeout: float = 600.0,
        profile: bool = False,
        ownership: OwnershipOptions | None = None,
    ) -> None:
        self._newton_schulz = GramNewtonSchulz(
            coefficients, steps, restarts, ns_dtype, layers=layers, on_miss=on_miss, eps=eps, graphs=graphs
        )
        self._adamw_options = {
            "lr": adamw_lr, "betas": adamw_betas, "eps": adamw_eps, "weight_decay": adamw_weight_decay,
        }
        check_adamw(self._adamw_options, "adamw_")
        checks.flag("skip_nonfinite", skip_nonfinite)
        checks.flag("verbose", verbose)
        self._skip_nonfinite, self._momentum_dtype = skip_nonfinite, dtype_of("momentum_dtype", momentum_dtype)
        self.skipped_steps = 0  # by skip_nonfinite, since this object was made
        self._fixed: dict[Tensor, dict[str, Any]] = {}  # by a group's first parameter
        self._gather: Gather | None = None
        self._grad_norm: Tensor | None = None
        self._is_to_clip = False  # at the end of an early_step
        self._forget()
        defaults = {
            "use_muon": True, "lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay,
            "scale": scale, "momentum_form": momentum_form, "cautious": cautious, "maximize": maximize, "split": (),
            "split_dim": 0, "flatten": False,
        }
        for option, patterns in (("include", include), ("exclude", exclude), ("flatten", flatten)):
            checks.strings(option, patterns, "patterns")
        by_pattern, table, groups = splits_of(splits), "", cast(Iterable[Any], params)
        if isinstance(params, nn.Module):
            groups, table = groups_of(params, include, exclude, flatten, by_pattern)
        elif by_pattern or flatten:
            raise UsageError("splits and flatten find parameters of a module; give groups their own split and flatten")
        super().__init__(groups, defaults)
        self._gather = gather_for(self, params, process_group, bucket_bytes, timeout, profile, ownership)
        self._choice = choice_of(mode, params, self._parameters(), self._gather is None)
        if verbose and table:
            print_once(table if self._gather is None else f"{table}\n{self._choice.mode}: {self._choice.why}")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; with ``use_muon`` False its missing options are the constructor's ``adamw_*``."""
        if not isinstance(param_group, dict):
            raise UsageError(f"a parameter group must be a dict, not {type(param_group).__name__}")
        group = dict(param_group)
        checks.flag(f"group {len(self.param_groups)}: use_muon", group.setdefault("use_muon", True))
        if not group["use_muon"]:
            group = {**self._adamw_options, **group}
        if isinstance(group.get("split"), Split):
            group["split"], group["split_dim"] = group["split"]
        super().add_param_group(group)
        added = self.param_groups[-1]
        if not added["use_muon"]:
            for name in MATRIX_OPTIONS:
                added.pop(name, None)
            # PyTorch's load_state_dict reads this key to keep AdamW's step counter on the parameter's device.
            added.setdefault("fused", all(p.device.type in FUSED_DEVICES for p in added["params"]))
            EagerAdamW([added])  # fills its other options in place
        try:
            check_last_group(self.param_groups)
        except UsageError:
            self.param_groups.pop()
            raise
        if added["use_muon"]:
            added["split"] = tuple(added["split"])  # a list could change unseen
        for p in added["params"][:1]:
            self._fixed[p] = {name: added[name] for name in FIXED_OPTIONS if name in added}
        self._forget()

    @property
    def mode(self) -> str:
        """Who orthogonalizes: ``local``, this process; ``gather``, owners who gather shards; ``dedicated`` ones."""
        return self._choice.mode

    @property
    def traffic(self) -> Traffic | None:
        """What this rank has done and sent, where parameters are distributed."""
        return None if self._gather is None else self._gather.traffic

    @property
    def assignment(self) -> Assignment | None:
        """Who owns which matrix, in the order of parameters, and at what cost; once the ranks have decided it."""
        return None if self._gather is None else self._gather.assignment

    def plan(self) -> tuple[Plan, ...]:
        """Resolve the kernels of every matrix now, one plan a device; otherwise the first step does it."""
        if self._gather is not None:
            return self._gather.place(self)
        self._check_groups()
        counts: Counter[Kind] = Counter()
        for setting in self._settings():
            for position, p in enumerate(setting.group["params"]):
                blocks = self._blocks_of(setting.group, setting.index, position) or Blocks()
                for rows, cols in blocks.shapes(p):
                    counts[setting.kind(p, p.dtype, rows, cols)] += 1
        wanted: dict[torch.device, list[tuple[Group, Kind]]] = defaultdict(list)
        for kind, count in counts.items():
            wanted[kind.device] += [(batch, kind) for _, batch in cut_batch(count, kind.rows, kind.cols)]
        resolved = []
        with self._newton_schulz.looking_up():
            for device, found in wanted.items():
                resolved.append(self._newton_schulz.plan_for([batch for batch, _ in found], device))
                for batch, kind in found:
                    self._newton_schulz.prepare(batch, device, kind.gradient_dtype, kind.mode, kind.dtype)
        self._planned = True
        return tuple(resolved)

    @contextmanager
    def early_step(self, max_norm: float | None = None) -> Iterator[None]:
        """Around the last backward before a :meth:`step`: dedicated owners begin the step as gradients arrive.

        The step then does what is left, and weights are the same to the bit. Gradients are to stay as this leaves them,
        so ``clip_grad_norm_`` is refused; whatever else is changed in between undoes what has begun, but for what is
        written past autograd (``p.grad.data``), which is not seen. Without dedicated matrices nothing begins.

        ``max_norm``: gradients of all of the optimizer's parameters are clipped as ``clip_grad_norm_`` does it, but by
        ``grad_norm``, the norm that they had in the step before; at the end their own one is put there. Where there is
        none, in a first step, that is what they are clipped by. All ranks give the same, as there is a reduction.
        docs/dedicated.md has what it takes.
        """
        if max_norm is not None:
            check_norm("max_norm", max_norm)
        with nullcontext() if self._gather is None else self._gather.early(self, max_norm):
            self._is_to_clip = max_norm is not None
            try:
                yield
            finally:
                self._is_to_clip = False
            if max_norm is not None and self._gather is None:
                self.grad_norm = clip_by_last_(self, max_norm, self.grad_norm, None)
            elif max_norm is not None and self._gather is not None:
                self.grad_norm = self._gather.clip(self, max_norm)

    @property
    def grad_norm(self) -> Tensor | None:
        """The last finite norm of gradients that ``early_step(max_norm=)`` has met, a tensor of no dimension. It is
        not in a ``state_dict``: save it beside one, and put it here again, so that a run goes on to the bit."""
        return self._grad_norm

    @grad_norm.setter
    def grad_norm(self, value: Tensor | None) -> None:
        checks.instance("grad_norm", value, Tensor)
        if value is not None and (value.ndim or not value.is_floating_point()):
            raise UsageError(f"grad_norm must be a floating-point tensor of no dimension, not {shown(value)}")
        self._grad_norm = value

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; ``closure`` re-evaluates the model and returns the loss, which is returned.

        What cannot be used (a sparse gradient, state of another shape or device, an option) raises before anything
        has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._is_to_clip:
            raise UsageError("step: gradients are clipped when early_step(max_norm=) ends; call it after that")
        if self._gather is None:
            self._step_alone()
        elif not self._gather.step(self):
            self.skipped_steps += 1
        return loss

    def _step_alone(self) -> None:
        with phase("check"):
            if not self._planned:
                self.plan()
                warn_idle(self._parameters())
            self._check_step()
            if self._skip_nonfinite and not are_finite(p.grad for p in self._parameters() if p.grad is not None):
                self.skipped_steps += 1
                return
        with phase("group"):
            batches = sorted_batches(self._settings(), self._found, self._layouts, self.state, self._momentum_dtype)
        for kind, batch in batches.items():
            with phase(f"{len(batch.weights)}x{kind.rows}x{kind.cols}"):
                batch.move(self._newton_schulz, kind)
        with phase("AdamW"):
            self._adamw_step()

    def report(self, spectra: bool = False) -> Report:
        """What each matrix runs on and how far it moves; with ``spectra`` its update's singular values too.

        Orthogonalizes every momentum anew and waits for it: for every hundredth step, not for each. Nothing changes.
        Where parameters are distributed, all ranks call this together and get the same.
        """
        if self._gather is not None:
            return self._gather.report(self, spectra)
        self._check_groups()
        if not self._planned:
            self.plan()
        directions: list[Direction] = []
        for setting in self._settings():
            for position, p in enumerate(setting.group["params"]):
                blocks = self._blocks_of(setting.group, setting.index, position) or Blocks()
                directions += directions_of(setting.group, setting.index, position, blocks, self.state.get(p, {}))
        return report(self._newton_schulz, directions, spectra, self.skipped_steps)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """PyTorch's, but a momentum keeps its values whatever the parameter's dtype, and state of another model is
        refused by name, with nothing changed. How a group's parameters are split stays as it is."""
        before, final = (self.state, self.param_groups), dict[str, Any]()
        handle = self.register_load_state_dict_pre_hook(lambda _, given: final.update(given))  # after the user's own
        error: Exception | None = None
        try:
            try:
                super().load_state_dict(state_dict)
                restore(self.state, self.param_groups, final, before[1], self._momentum_dtype)
                self._check_step(with_gradient=False)
            except Exception as raised:
                error = raised
            if self._gather is not None:
                self._gather.take(self, error)
            elif error is not None:
                raise error
        except Exception:
            self.state, self.param_groups = before
            raise
        finally:
            handle.remove()
            self._forget()

    def state_dict(self) -> dict[str, Any]:
        """PyTorch's; of distributed parameters each momentum is placed like its parameter, and all ranks call it."""
        if self._gather is None:
            return super().state_dict()
        live = self.state
        self.state = defaultdict(dict, self._gather.state(self))
        try:
            return super().state_dict()
        finally:
            self.state = live

    def _forget(self) -> None:
        """What was derived from the groups."""
        self._adamw: EagerAdamW | None = None
        self._planned = False
        self._layouts: Layouts = {}
        self._found: dict[int, Found] = {}  # by the group's index
        self._tried: dict[int, Any] = {}  # the form of AdamW's options that can be used, by the group's index

    def _parameters(self) -> Iterator[Tensor]:
        return (p for group in self.param_groups for p in group["params"])

    def _settings(self) -> Iterator[Setting]:
        """Every Muon group's."""
        return (Setting(group, index) for index, group in enumerate(self.param_groups) if group["use_muon"])

    def _blocks_of(self, group: dict[str, Any], index: int, position: int) -> Blocks | None:
        """How the parameter is to be read, remembered while it lies as it does; None: it is one matrix."""
        p = group["params"][position]
        lies = p.shape, p.stride()
        held = self._layouts.get(p)
        if held is None or held[0] != lies:
            blocks = blocks_of(p, group, name_of(group, index, position))
            self._layouts[p] = held = lies, None if blocks == Blocks() and p.ndim == 2 else blocks
        return held[1]

    def _check_groups(self) -> None:
        """UsageError for options that are missing, cannot be used, or have changed and cannot."""
        for index, group in enumerate(self.param_groups):
            fixed = self._fixed.get(group["params"][0], {}) if group["params"] else {}
            check_fixed(group, fixed, f"group {index}: ")
            check_options(group, f"group {index}: ", wait=False)
            if not group["use_muon"] and self._tried.get(index) != (form := form_of(group)):
                try_adamw(group, self.state, f"group {index}: ")
                self._tried[index] = form

    def _check_step(self, with_gradient: bool = True) -> None:
        """UsageError, by name, for what would fail once something had changed."""
        self._check_groups()
        for index, group in enumerate(self.param_groups):
            before = self._found.get(index)
            if with_gradient and before is not None and before.is_so(group, self.state):
                continue
            for position, p in enumerate(group["params"]):
                if with_gradient and p.grad is None:
                    continue
                reason = unusable(p, self.state.get(p, {}), group)
                if reason is not None:
                    raise UsageError(f"{name_of(group, index, position)}: {reason}")
                if group["use_muon"]:
                    self._blocks_of(group, index, position)
                else:
                    lay_state(p, self.state.get(p, {}))
            self._found[index] = Found(group, self.state)

    def _adamw_step(self) -> None:
        groups = [group for group in self.param_groups if not group["use_muon"]]
        if not groups:
            return
        if self._adamw is None:
            self._adamw = EagerAdamW(groups)
        self._adamw.param_groups = groups
        self._adamw.state = self.state
        self._adamw.step()

    def __getstate__(self) -> dict[str, Any]:
        if self._gather is not None:
            raise UsageError("an optimizer of several processes cannot be pickled or copied; save its state_dict()")
        derived = ("_adamw", "_planned", "_layouts", "_found", "_tried", "_gather")
        own = (
            "_newton_schulz", "_fixed", "_choice", "_adamw_options", "_skip_nonfinite", "_momentum_dtype",
            "skipped_steps", "_grad_norm", "_is_to_clip",
        )
        fresh: dict[str, Any] = dict(zip(derived, (None, False, {}, {}, {}, None), strict=True))
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in own}, **fresh}
