"""Clipping by the global norm equals PyTorch's of the model that is not sharded, in every layout and in mixes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dmuon_tune.errors import DmuonTuneError, UsageError
from dmuon_tune.runtime import Muon, clip_grad_norm_

from .layouts import LAYOUTS, OPTIONS, Toy, gradients, local, mesh_of, named, parallel, piece, places_of
from .world import Worlds

NORMS = ((2.0, 0.5), (2.0, 1e9), (1.0, 3.0), (3.0, 0.1), (math.inf, 0.01), (2.0, math.inf))


close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-7)  # sums in another order


def expected(full: Iterable[Tensor], max_norm: float, norm_type: float) -> tuple[Tensor, list[Tensor]]:
    """PyTorch's norm, and the gradients as it leaves them."""
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in full]
    for p, gradient in zip(parameters, full, strict=True):
        p.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    return norm, [p.grad for p in parameters if p.grad is not None]


def clipping(rank: int, size: int) -> None:
    shapes = {name: p.shape for name, p in named(Toy()).items()}
    full = gradients(shapes, step=1)
    layouts = [*LAYOUTS[size], "columns"]
    models = {layout: (parallel(Toy(), layout, size), places_of(Toy, layout, size)) for layout in layouts}
    for norm_type, max_norm in NORMS:
        norm, clipped = expected(full.values(), max_norm, norm_type)
        for layout, (model, places) in models.items():
            set_gradients(model, places, full)
            close(clip_grad_norm_(model, max_norm, norm_type), norm)
            for (name, p), wanted in zip(named(model).items(), clipped, strict=True):
                assert p.grad is not None
                close(local(p.grad), wanted.flatten()[places[name]], msg=f"{layout} {name}")
        mixed = [p for model, places in models.values() for p in set_gradients(model, places, full)]
        together, _ = expected([g for _ in models for g in full.values()], max_norm, norm_type)
        close(clip_grad_norm_(iter(mixed), max_norm, norm_type), together)
    model, places = models["fsdp"]
    odd_ones(rank, size, model, places, full)


def set_gradients(model: nn.Module, places: dict[str, Tensor], full: dict[str, Tensor]) -> list[nn.Parameter]:
    for name, p in named(model).items():
        p.grad = piece(p, places[name], full[name])
    return list(model.parameters())


def odd_ones(rank: int, size: int, model: nn.Module, places: dict[str, Tensor], full: dict[str, Tensor]) -> None:
    """Gradients that are missing, of another dtype, partial or not finite; an optimizer; another group."""
    optimizer = Muon(model, **OPTIONS)
    set_gradients(model, places, full)
    norm, _ = expected(full.values(), 1.0, 2.0)
    close(clip_grad_norm_(optimizer, 1.0), norm)
    # Without most of the gradients, and without any.
    set_gradients(model, places, full)
    name, only = next(iter(named(model).items()))
    for p in model.parameters():
        p.grad = p.grad if p is only else None
    norm, _ = expected([full[name]], 1.0, 2.0)
    close(clip_grad_norm_(model, 1.0), norm)
    only.grad = None
    assert clip_grad_norm_(model, 1.0) == 0
    # bf16, whose norm is not rounded to bf16.
    wide = full[name].bfloat16()
    half = nn.Parameter(DTensor.from_local(torch.zeros_like(places[name], dtype=torch.bfloat16), mesh_of("fsdp", size),
                                           [Shard(0)], run_check=False, shape=wide.shape, stride=wide.stride()))
    half.grad = piece(half, places[name], wide)
    close(clip_grad_norm_(half, 1.0), expected([wide.float()], 1.0, 2.0)[0])
    # Each rank's part of a sum.
    mesh = mesh_of("fsdp", size)
    sums = nn.Parameter(DTensor.from_local(torch.zeros(3, 4), mesh, [Replicate()]))
    sums.grad = DTensor.from_local(torch.full((3, 4), 1.0 + rank), mesh, [Partial()])
    whole = torch.full((3, 4), float(sum(range(1, size + 1))))
    norm, (clipped,) = expected([whole], 1.0, 2.0)
    close(clip_grad_norm_([sums], 1.0), norm)
    close(sums.grad.full_tensor(), clipped)
    # One entry on one rank: all ranks raise, and nothing has changed.
    for power in (2.0, math.inf):
        for bad in (math.nan, math.inf):
            broken = dict(full)
            broken[name] = full[name].clone()
            broken[name][-1, -1] = bad
            set_gradients(model, places, broken)
            with pytest.raises(DmuonTuneError, match=f"the gradients' norm is {bad}: nothing was clipped"):
                clip_grad_norm_(model, 1.0, power, error_if_nonfinite=True)
            assert only.grad is not None
            close(local(only.grad), broken[name].flatten()[places[name]], equal_nan=True)
            found = clip_grad_norm_(model, 1.0, power)
            assert found.isnan() if math.isnan(bad) else found.isinf()
    # What two of the ranks have is no part of the others' norm.
    with pytest.raises(UsageError, match="in 3 shards is not on all of 4 ranks"):
        half_mesh = DTensor.from_local(torch.ones(1, 4), init_device_mesh("cpu", (3,)), [Shard(0)], run_check=False)
        of_three = nn.Parameter(half_mesh)
        of_three.grad = half_mesh.clone()
        clip_grad_norm_(of_three, 1.0)


def on_halves(rank: int, size: int) -> list[str]:
    """Why parameters are refused that two of four ranks have, or that are others on the other two."""
    ranks = [0, 1] if rank < 2 else [2, 3]
    mesh = DeviceMesh("cpu", ranks, _init_backend=False)
    groups = [dist.new_group(each) for each in ([0, 1], [2, 3])]

    def stage(rows: int, name: str) -> nn.Module:
        p = nn.Parameter(DTensor.from_local(torch.full((rows, 4), 1.0 + rank), mesh, [Shard(0)], run_check=False))
        p.grad = p.detach().clone()
        module = nn.Module()
        module.register_parameter(name, p)
        return module

    reasons = []
    for other in (stage(1 + rank // 2, "weight"), stage(1, f"stage{rank // 2}")):
        for _ in range(2):  # a refusal is no agreement
            with pytest.raises(UsageError) as raised:
                clip_grad_norm_(other, 1.0)
            reasons.append(str(raised.value))
        (p,) = other.parameters()
        assert p.grad is not None and local(p.grad).eq(1.0 + rank).all()
        close(clip_grad_norm_(other, math.inf, math.inf), torch.tensor(float(size)))
        own = math.sqrt(sum(local(p).numel() * (1 + each) ** 2 for each in ranks))
        close(clip_grad_norm_(other, 1.0, process_group=groups[rank // 2]), torch.tensor(own))
    alone = nn.Parameter(DTensor.from_local(torch.ones(1 if rank < 2 else 0, 4), init_device_mesh("cpu", (2,)),
                                            [Shard(0)], run_check=False, shape=torch.Size((2, 4)), stride=(4, 1)))
    alone.grad = alone.detach().clone()
    with pytest.raises(UsageError) as raised:
        clip_grad_norm_([alone], 1.0)
    return [*reasons, str(raised.value)]


def test_ranks_with_other_parameters_are_refused(worlds: Worlds) -> None:
    said = ("clip_grad_norm_: not each of 4 ranks has given its part of the same parameters; give all of them, those "
            "without a gradient too, and the process_group of ranks that have them")
    assert worlds(4).run(on_halves) == [[said] * 5] * 4


def in_other_order(rank: int, size: int) -> list[str]:
    """The same parameters in another order are the same; what a rank says of one that it alone leaves out."""
    model = parallel(Toy(), "fsdp", size)
    places = places_of(Toy, "fsdp", size)
    full = gradients({name: p.shape for name, p in named(model).items()}, step=1)
    given = set_gradients(model, places, full)
    norm, _ = expected(full.values(), 1e9, 2.0)
    close(clip_grad_norm_(given[::-1] if rank else given, 1e9), norm)
    said = []
    for some in (given[1:], given[1:], given):
        try:
            said.append(str(clip_grad_norm_(some if rank else given, 1e9).isnan().item()))
        except UsageError as refused:
            said.append(type(refused).__name__)
        said.append(str(any(p.grad is not None and local(p.grad).isnan().any() for p in given)))
        set_gradients(model, places, full)
    return said


def test_a_list_that_differs_later_gives_no_wrong_norm(worlds: Worlds) -> None:
    knows, is_new = worlds(2).run(in_other_order)
    assert knows == ["True", "True"] * 2 + ["False", "False"]
    assert is_new == ["UsageError", "False"] * 2 + ["False", "False"]


def test_every_layout_gives_pytorchs_norm(worlds: Worlds) -> None:
    worlds(4).run(clipping)


def test_without_ranks_it_is_pytorchs() -> None:
    full = gradients({name: p.shape for name, p in named(Toy()).items()}, step=2)
    for norm_type, max_norm in NORMS:
        norm, clipped = expected(full.values(), max_norm, norm_type)
        model = Toy()
        for name, p in named(model).items():
            p.grad = full[name].clone()
        close(clip_grad_norm_(model.parameters(), max_norm, norm_type), norm)
        for p, wanted in zip(model.parameters(), clipped, strict=True):
            close(p.grad, wanted)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_norm": -1.0}, "max_norm must be a positive number or inf, not -1.0"),
        ({"max_norm": math.nan}, "max_norm must be a positive number or inf, not nan"),
        ({"norm_type": 0}, "norm_type must be a positive number or inf, not 0"),
        ({"norm_type": "fro"}, "norm_type must be a positive number or inf, not 'fro'"),
        ({"parameters": 3}, "parameters must be a sequence of Tensor, not 3"),
        ({"process_group": "world"}, "process_group must be a ProcessGroup, not 'world'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        clip_grad_norm_(**{"parameters": [torch.zeros(2)], "max_norm": 1.0, **options})
    assert str(refused.value) == said


def test_a_sparse_gradient_is_refused() -> None:
    embedding = nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="a gradient is sparse"):
        clip_grad_norm_(embedding, 1.0)
