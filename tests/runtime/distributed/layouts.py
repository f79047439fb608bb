"""A toy language model of odd shapes, the layouts it is trained in, and which elements of a parameter a rank holds."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from dmuon_tune.runtime import dedicate
from dmuon_tune.runtime.distributed.whole import whole_of

from ..reference import gaussian

VOCABULARY, WIDTH, LENGTH, CUT = 32, 18, 12, (12, 12, 16)
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "splits": {"*qkv.weight": CUT}, "verbose": False}
DEDICATE_OPTIONS = {"param_dtype", "reduce_dtype", "units", "reshard_after_forward", "exclude", "flatten", "splits"}
LAYOUTS = {1: ("fsdp", "ddp"), 2: ("fsdp", "hsdp", "tp", "ddp"), 3: ("fsdp", "ddp"), 4: ("fsdp", "hsdp", "tp", "ddp")}
TENSOR_PARALLEL = {
    "qkv": ColwiseParallel(output_layouts=Replicate()), "out": RowwiseParallel(input_layouts=Replicate()),
    "up": ColwiseParallel(), "down": RowwiseParallel(),
}


class Layer(nn.Module):
    """Attention of one head, whose Q, K and V are one parameter, and an MLP."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, sum(CUT)), nn.Linear(CUT[2], WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).split(CUT, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        result: Tensor = x + self.down(F.gelu(self.up(x)))
        return result


class Experts(nn.Module):
    """The mean of three MLPs: two parameters of three matrices each."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Parameter(gaussian(3, 10, WIDTH) / 4)
        self.back = nn.Parameter(gaussian(3, WIDTH, 10) / 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(torch.einsum("btw,ehw->bteh", x, self.into))
        return torch.einsum("bteh,ewh->btw", hidden, self.back) / 3


class Toy(nn.Module):
    """18 matrices, 6 a layer and 6 experts, and what is AdamW's; few sides divide by the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(50), Layer(2304)])
        self.experts = Experts()
        self.gate, self.lift = nn.Linear(WIDTH, 1), nn.Linear(1, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text)
        for layer in self.layers:
            x = layer(x)
        x = x + self.experts(x)
        result: Tensor = self.head(x + self.lift(self.gate(x)))
        return result


class Alone(nn.Module):
    """One matrix of fewer rows than a world of 8 has ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(gaussian(7, 5))


class Vectors(nn.Module):
    """Matrices with a side of 1: Muon's only where groups say so."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.column = nn.Parameter(gaussian(1, 33)), nn.Parameter(gaussian(29, 1))


class Nineteen(nn.Module):
    """19 matrices, and the (18, 2304) whose rows do not divide by 8."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(nn.Parameter(gaussian(12, 20, seed=seed)) for seed in range(18))
        self.wide = nn.Parameter(gaussian(18, 2304))


def text(count: int, seed: int) -> Tensor:
    """int64 of (count, LENGTH + 1): a walk that a model can learn."""
    rng = torch.Generator().manual_seed(seed)
    start = torch.randint(0, VOCABULARY, (count, 1), generator=rng)
    return (start + 3 * torch.arange(LENGTH + 1) ** 2) % VOCABULARY


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


@functools.cache
def mesh_of(layout: str, size: int) -> DeviceMesh:
    if layout.endswith("hsdp"):
        return init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    if layout == "tp":
        return init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("shard", "tensor"))
    return init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))


def parallel(model: nn.Module, layout: str, size: int, **options: Any) -> nn.Module:
    """The model in a layout: ``fsdp``, ``columns`` (FSDP2 that cuts columns where it can), ``hsdp``, ``tp`` (with FSDP2
    on the mesh's other dimension), ``ddp``, or ``dedicated`` and ``dedicated hsdp``, with owners for its matrices;
    ``options`` are ``fully_shard``'s and ``dedicate``'s, or DistributedDataParallel's."""
    if layout == "ddp":
        return DistributedDataParallel(model, **options)
    mesh = mesh_of(layout, size)
    if layout.startswith("dedicated"):
        own = {name: options.pop(name) for name in DEDICATE_OPTIONS & options.keys()}
        options["ignored_params"] = dedicate(model, mesh, **{"splits": OPTIONS["splits"], **own})
    parts = [module for module in model.modules() if isinstance(module, Layer | Experts)]
    if layout == "tp":
        for part in parts:
            if isinstance(part, Layer):
                parallelize_module(part, mesh["tensor"], dict(TENSOR_PARALLEL))
        mesh = mesh["shard"]
    if layout == "columns":
        options["shard_placement_fn"] = lambda p: Shard(1) if p.ndim > 1 and p.shape[1] % size == 0 else None
    for part in (*parts, model):
        fully_shard(part, mesh=mesh, **options)
    return model


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name.removeprefix("module."): p for name, p in model.named_parameters()}


@functools.cache
def places_of(make: Callable[[], nn.Module], layout: str, size: int) -> dict[str, Tensor]:
    """The flat indices of the elements that this rank holds of each parameter, shaped as it holds them.

    From a model whose elements are their own indices: PyTorch lays it out, so that nothing tested has a part in it.
    What has an owner is taken as FSDP2's too: :func:`held` asks the model.
    """
    layout = {"dedicated": "fsdp", "dedicated hsdp": "hsdp"}.get(layout, layout)
    model = make()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.arange(p.numel()).view(p.shape))
    return {name: local(p).long() for name, p in named(parallel(model, layout, size)).items()}


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it, a copy."""
    whole = whole_of(tensor)
    if whole is not None:
        return whole.weight.clone()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def held(parameters: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """The places of a rank's elements, and their values; who owns a parameter is the model's to say, not ``places``."""
    found = {}
    for name, p in parameters.items():
        values, whole = local(p), whole_of(p)
        at = places[name] if whole is None else torch.arange(values.numel()).view(values.shape)
        found[name] = at, values
    return found


def piece(p: Tensor, places: Tensor, full: Tensor) -> Tensor:
    """What of ``full`` this rank holds, placed as ``p``; all of it where that has an owner."""
    if whole_of(p) is not None:
        return full
    held = full.flatten()[places]
    if not isinstance(p, DTensor):
        return held
    return DTensor.from_local(held, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def gradients(shapes: Mapping[str, Sequence[int]], step: int) -> dict[str, Tensor]:
    """The same on every rank and in every run."""
    return {name: gaussian(*shape, seed=zlib.crc32(f"{name} {step}".encode())) for name, shape in shapes.items()}


def whole(shapes: Mapping[str, Sequence[int]], ranks: Sequence[Mapping[str, tuple[Tensor, Tensor]]]
          ) -> Iterator[tuple[str, Tensor]]:
    """Each tensor from all ranks' (places, values); AssertionError where an element is missing or replicas differ."""
    for name, shape in shapes.items():
        full = torch.zeros(*shape, dtype=ranks[0][name][1].dtype).flatten()
        held = torch.zeros_like(full, dtype=torch.bool)
        for places, values in (rank[name] for rank in ranks):
            places, values = places.flatten(), values.flatten()
            both = held[places]
            assert torch.equal(full[places][both], values[both]), f"{name}: replicas differ"
            full[places], held[places] = values, True
        assert held.all(), f"{name}: no rank holds {int((~held).sum())} of its elements"
        yield name, full.view(*shape)
