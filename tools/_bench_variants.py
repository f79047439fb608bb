"""The optimizers that bench_train compares, each on a model that FSDP2 has sharded over one mesh dimension."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from _bench_methods import STEPS, plain_ns
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from dmuon_tune.coefficients import CoefficientSet
from dmuon_tune.matrices import select
from dmuon_tune.recipe import Group
from dmuon_tune.runtime import Muon
from dmuon_tune.runtime.distributed.exchange import Traffic
from dmuon_tune.runtime.newton_schulz import cut_batch
from dmuon_tune.runtime.ownership import Assignment, profile
from dmuon_tune.runtime.scales import SCALES

# torch 2.13 renames it and warns of the old name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

LR, ADAMW_LR, BETAS, MOMENTUM, SCALE = 1e-3, 3e-4, (0.9, 0.95), 0.95, "moonlight"


@dataclass(frozen=True)
class Setting:
    """What the variants' makers get; ``profile`` and ``bucket_bytes`` are our optimizer's. ``still``: rates of 0."""

    coefficients: CoefficientSet
    profile: bool
    bucket_bytes: int
    still: bool

    @property
    def lr(self) -> float:
        return 0.0 if self.still else LR

    @property
    def adamw_lr(self) -> float:
        return 0.0 if self.still else ADAMW_LR


Ownership = tuple[Assignment, dict[Group, tuple[int, float]]]


class Variant(Protocol):
    """An optimizer, the backward before its step, and what each step does on this rank: Newton–Schulz runs and bytes
    sent to other ranks; who owns what, and microseconds of each batch that this rank owns, with nothing beside it, by
    batch and how often it comes (None without owners)."""

    def backward(self, loss: Tensor) -> Any: ...

    def step(self) -> Any: ...

    def runs(self) -> int: ...

    def sent_bytes(self) -> int: ...

    def ownership(self, device: torch.device) -> Ownership | None: ...


def adamw(parameters: Sequence[nn.Parameter], setting: Setting) -> AdamW:
    return AdamW(parameters, lr=setting.adamw_lr, betas=BETAS, weight_decay=0.0, fused=True)


class Plain:
    """What leaves the backward to PyTorch."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()


class AdamWAlone(Plain):
    """Every parameter by PyTorch's fused AdamW, on its shards."""

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        self.step = adamw(list(model.parameters()), setting).step

    def runs(self) -> int:
        return 0

    def sent_bytes(self) -> int:
        return 0

    def ownership(self, device: torch.device) -> None:
        return None


class GatheredMuon(Plain):
    """Muon as one writes it for shards: every rank gathers every direction in bf16, in batches of equal matrices, and
    orthogonalizes all of it by plain Newton–Schulz on the vendor library, wide as :func:`plain_ns` takes it."""

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        self.coefficients, self.lr = setting.coefficients, setting.lr
        named = dict(model.named_parameters())
        chosen = {matrix.name for matrix in select((name, tuple(p.shape)) for name, p in named.items()).matrices}
        self.by_shape: dict[tuple[int, int], list[DTensor]] = defaultdict(list)
        for name, p in named.items():
            if name in chosen:
                self.by_shape[tuple(p.shape)].append(p)
        self.momenta = {p: torch.zeros_like(p.to_local()) for some in self.by_shape.values() for p in some}
        self.adamw = adamw([p for name, p in named.items() if name not in chosen], setting)

    def batches(self) -> Iterator[tuple[int, int, list[DTensor]]]:
        """Rows, columns and the parameters of one batch, of the size that our own optimizer takes at most."""
        for (rows, cols), parameters in self.by_shape.items():
            for part, _ in cut_batch(len(parameters), rows, cols):
                yield rows, cols, parameters[part]

    @torch.no_grad()
    def step(self) -> None:
        for rows, cols, parameters in self.batches():
            gradients = [p.grad.to_local() for p in parameters]
            momenta = [self.momenta[p] for p in parameters]
            torch._foreach_mul_(momenta, MOMENTUM)
            torch._foreach_add_(momenta, gradients)
            shards = torch.stack(torch._foreach_add(gradients, momenta, alpha=MOMENTUM))
            whole, first = gathered(shards, rows, parameters[0].device_mesh.get_group())
            own = plain_ns(whole, self.coefficients, torch.bfloat16)[:, first : first + shards.shape[1]]
            weights = [p.to_local() for p in parameters]
            torch._foreach_add_(weights, own.to(shards.dtype).unbind(), alpha=-self.lr * SCALES[SCALE](rows, cols))
        self.adamw.step()

    def runs(self) -> int:
        return sum(len(parameters) for parameters in self.by_shape.values())

    def sent_bytes(self) -> int:
        return sum(
            (p.device_mesh.size() - 1) * shard_rows(p.shape[0], p.device_mesh.size()) * p.shape[1] * 2
            for parameters in self.by_shape.values() for p in parameters
        )

    def ownership(self, device: torch.device) -> None:
        return None


class MatrixByMatrix(GatheredMuon):
    """The same without batches, as most implementations have it: each matrix gathered and orthogonalized alone."""

    def batches(self) -> Iterator[tuple[int, int, list[DTensor]]]:
        for (rows, cols), parameters in self.by_shape.items():
            for p in parameters:
                yield rows, cols, [p]


def shard_rows(rows: int, size: int) -> int:
    """Rows of FSDP2's largest shard; others are padded to it when they are gathered."""
    return -(-rows // size)


def gathered(shards: Tensor, rows: int, group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """(batch, rows, cols) in bf16 from every rank's (batch, its rows, cols), and where this rank's rows begin."""
    size, (batch, own, cols) = group.size(), shards.shape
    most = shard_rows(rows, size)
    sent = shards.new_zeros(batch, most, cols, dtype=torch.bfloat16)
    sent[:, :own] = shards
    received = sent.new_empty(size * batch, most, cols)
    all_gather(received, sent, group=group)
    whole = received.unflatten(0, (size, batch)).transpose(0, 1).reshape(batch, size * most, cols)[:, :rows]
    return whole, min(rows, most * group.rank())


class OwnedMuon(Plain):
    """Ours: each matrix orthogonalized once, on its owner, to whom the step brings it, or who keeps it."""

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        self.optimizer = Muon(
            model, lr=setting.lr, momentum=MOMENTUM, scale=SCALE, coefficients=setting.coefficients, steps=STEPS,
            adamw_lr=setting.adamw_lr, adamw_betas=BETAS, verbose=False, bucket_bytes=setting.bucket_bytes,
            profile=setting.profile,
        )
        self.step = self.optimizer.step

    def runs(self) -> int:
        return self._traffic.ns_runs // self._traffic.steps

    def sent_bytes(self) -> int:
        return self._traffic.bytes_sent // self._traffic.steps

    @property
    def _traffic(self) -> Traffic:
        found = self.optimizer.traffic
        assert found is not None  # the model is sharded
        return found

    def ownership(self, device: torch.device) -> Ownership | None:
        gather, assignment = self.optimizer._gather, self.optimizer.assignment
        assert gather is not None and assignment is not None
        matrices, batches, dtypes = gather._survey.matrices, Counter[Group](), set[torch.dtype]()
        for stage in gather._whole:
            dtypes.add(stage.dtype)
            if stage.batch:
                first = matrices[stage.batch[0]]
                batches[Group(len(stage.batch), first.rows, first.cols)] += 1
        (dtype,) = dtypes  # of this model's weights
        alone = profile(batches, device, gather._newton_schulz, dtype)
        return assignment, {each.group: (batches[each.group], each.us) for each in alone}


class EarlyMuon(OwnedMuon):
    """The same, whose owners begin the step in the backward."""

    def backward(self, loss: Tensor) -> None:
        with self.optimizer.early_step():
            super().backward(loss)


DEDICATED, EARLY = "dedicated", "dedicated-early"  # their model is another one
Make = Callable[[nn.Module, Setting], Variant]
# In the order that they are measured in: later ones are set in relation to the first two.
VARIANTS: dict[str, tuple[str, Make]] = {
    "adamw": ("AdamW, fused", AdamWAlone),
    "gather-then-compute": ("Muon, gather-then-compute", GatheredMuon),
    "gather-each": ("the same, each matrix alone", MatrixByMatrix),
    "ours": ("Muon, ours", OwnedMuon),
    DEDICATED: ("Muon, dedicated owners", OwnedMuon),
    EARLY: ("the same, begun in the backward", EarlyMuon),
}
