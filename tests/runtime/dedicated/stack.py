"""A model of equal blocks with one matrix each, most of them entries of a list, and its training in one process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from dmuon_tune.runtime import Muon, clip_grad_norm_, dedicate
from dmuon_tune.runtime.distributed.pieces import local_of
from dmuon_tune.runtime.distributed.whole import is_elsewhere

from ..distributed.layouts import mesh_of
from ..reference import gaussian

WIDTH, LAYERS = 12, 5


class Stack(nn.Module):
    """``runs`` says which blocks run, by place, in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.mixer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.runs: Sequence[int] = range(LAYERS)
        with torch.no_grad():
            for seed, p in enumerate(self.parameters()):
                p.copy_(gaussian(*p.shape, seed=seed) / 4)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text)
        for place in self.runs:
            x = x + F.gelu(self.blocks[place](x))
        result: Tensor = self.head(self.mixer(x))
        return result


def loss_of(model: nn.Module, seed: int) -> Tensor:
    text = torch.randint(16, (4, 8), generator=torch.Generator().manual_seed(seed))
    return F.cross_entropy(model(text).flatten(0, 1), text.flatten())


def scale_gradients(parameters: Iterable[Tensor], factor: Tensor | float) -> None:
    """Those that this rank has."""
    for p in parameters:
        if p.grad is not None and not is_elsewhere(p):
            local_of(p.grad).mul_(factor)


def clip_by_last_norm(optimizer: Muon, max_norm: float) -> Tensor:
    """What ``early_step(max_norm)`` does to gradients, by hand; the factor."""
    norm, last = clip_grad_norm_(optimizer, math.inf), optimizer.grad_norm
    factor = (max_norm / ((norm if last is None else last) + 1e-6)).clamp(max=1.0)
    scale_gradients(optimizer._parameters(), factor)
    optimizer.grad_norm = norm
    return factor


def dedicated(size: int, make: type[Stack] = Stack, **options: object) -> Stack:
    model = make()
    owned = dedicate(model, mesh_of("fsdp", size), **options)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh_of("fsdp", size), ignored_params=owned)
    return model
