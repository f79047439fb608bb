"""A model of equal blocks with one matrix each, most of them entries of a list, and its training in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from dmuon_tune.runtime import dedicate

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


def dedicated(size: int, make: type[Stack] = Stack, **options: object) -> Stack:
    model = make()
    owned = dedicate(model, mesh_of("fsdp", size), **options)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh_of("fsdp", size), ignored_params=owned)
    return model
