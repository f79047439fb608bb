"""Whose parameters are distributed, over which group, and what else an optimizer may be asked there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from dmuon_tune.errors import UsageError
from dmuon_tune.runtime import Muon

from ..reference import gaussian
from .cases import Steps, alone, assert_as_alone, assert_equal
from .layouts import Alone, Nineteen, Toy, gradients, local, mesh_of, named, parallel, piece, places_of
from .world import Worlds


def stages(rank: int, size: int) -> tuple[Tensor, int]:
    """Two pipeline stages of half the ranks each, whose optimizers know nothing of each other."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("stage", "shard"))["shard"]
    stage, model = rank // (size // 2), Alone()
    fully_shard(model, mesh=mesh)
    optimizer = Muon(model, process_group=mesh.get_group(), verbose=False)
    p = model.weight
    for step in range(2 + stage):  # as many steps as the stage wants
        part = gradients({str(stage): p.shape}, step)[str(stage)].chunk(size // 2)[mesh.get_local_rank()]
        p.grad = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=p.shape, stride=p.stride())
        optimizer.step()
    assert optimizer.traffic is not None
    return p.full_tensor().detach(), optimizer.traffic.ns_runs


def test_a_group_of_some_ranks(worlds: Worlds) -> None:
    found = worlds(4).run(stages)
    for stage in range(2):
        p = Alone().weight
        optimizer = Muon([p])
        for step in range(2 + stage):
            p.grad = gradients({str(stage): p.shape}, step)[str(stage)]
            optimizer.step()
        halves = found[2 * stage : 2 * stage + 2]
        assert all(torch.equal(weight, p) for weight, _ in halves)
        assert sum(runs for _, runs in halves) == 2 + stage


def expert_parallel(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Experts over one mesh dimension and their columns over the other; beside them a matrix over all ranks."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("expert", "shard"))
    flat = mesh_of("fsdp", size)
    experts, matrix = gaussian(5, 6, 8), gaussian(9, 10, seed=1)

    def laid(tensor: Tensor, first: bool) -> DTensor:
        if not first:
            return laid_out(tensor, flat, [Shard(1)])
        return laid_out(tensor, mesh, [Shard(0), Shard(2)])

    weights = [nn.Parameter(laid(experts, True)), nn.Parameter(laid(matrix, False))]
    optimizer = Muon(weights, weight_decay=0.1)
    for step in range(3):
        given = gradients({"experts": experts.shape, "matrix": matrix.shape}, step)
        weights[0].grad, weights[1].grad = laid(given["experts"], True), laid(given["matrix"], False)
        optimizer.step()
    return weights[0].full_tensor().detach(), weights[1].full_tensor().detach()


def laid_out(tensor: Tensor, mesh: Any, placements: Any) -> DTensor:
    replicated = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=placements)


def test_experts_over_a_mesh_dimension(worlds: Worlds) -> None:
    experts, matrix = nn.Parameter(gaussian(5, 6, 8)), nn.Parameter(gaussian(9, 10, seed=1))
    optimizer = Muon([experts, matrix], weight_decay=0.1)
    for step in range(3):
        given = gradients({"experts": experts.shape, "matrix": matrix.shape}, step)
        experts.grad, matrix.grad = given["experts"], given["matrix"]
        optimizer.step()
    for found in worlds(4).run(expert_parallel):
        assert torch.equal(found[0], experts) and torch.equal(found[1], matrix)


def whole_gradients(rank: int, size: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Gradients that lie otherwise than their parameters are laid as these."""
    plan = Steps(Nineteen)
    places, model = places_of(plan.make, "fsdp", size), parallel(plan.model(), "fsdp", size)
    parameters, mesh = named(model), mesh_of("fsdp", size)
    optimizer = plan.optimizer(model)
    plan.run(optimizer, parameters, lambda _, full: DTensor.from_local(full, mesh, [Replicate()], run_check=False))
    return {name: (places[name], local(p)) for name, p in parameters.items()}


def test_replicated_gradients_of_shards(worlds: Worlds) -> None:
    assert_equal(Steps(Nineteen), worlds(2).run(whole_gradients), alone(Steps(Nineteen)), "replicated gradients")


def asked(rank: int, size: int, layout: str) -> None:
    """Closures, groups added later, options that change, a step without any gradient, two optimizers, a copy."""
    places, model, twin = places_of(Toy, layout, size), parallel(Toy(), layout, size), Toy()
    parameters, own = named(model), named(twin)
    late = [name for name in own if name.startswith("layers.1") and own[name].ndim == 2]
    first = [name for name in own if own[name].ndim == 2 and name not in late]
    both = [Muon([each[name] for name in first], lr=0.1) for each in (parameters, own)]
    others = [Muon([p for p in each.values() if p.ndim == 3], lr=0.1) for each in (parameters, own)]

    def give(step: int) -> None:
        for name, gradient in gradients({name: p.shape for name, p in own.items()}, step).items():
            own[name].grad, parameters[name].grad = gradient, piece(parameters[name], places[name], gradient)

    give(0)
    for optimizer in (*both, *others):
        assert optimizer.step(lambda: 1.5) == 1.5
    for each, optimizer in zip((parameters, own), both, strict=True):
        optimizer.zero_grad()
        optimizer.step()  # there is nothing to do
        optimizer.add_param_group({"params": [each[name] for name in late], "lr": 0.3, "scale": "spectral"})
        optimizer.param_groups[0].update(momentum=0.5, nesterov=False, weight_decay=0.2)
    for step in (1, 2):
        give(step)
        for optimizer in (*both, *others):
            optimizer.step()
        for optimizer in both:
            optimizer.param_groups[1]["lr"] = 0.01
            optimizer.zero_grad(set_to_none=False)
    for name, p in parameters.items():
        assert torch.equal(local(p), own[name].detach().flatten()[places[name]]), name
    with pytest.raises(UsageError, match="state_dict"):
        copy.deepcopy(both[0])


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_what_an_optimizer_is_asked(worlds: Worlds, layout: str) -> None:
    worlds(4).run(asked, layout)


def found_modes(rank: int, size: int) -> list[bool]:
    """Whether each is distributed; FSDP1's flat parameters are refused."""
    model = parallel(Alone(), "fsdp", size)
    half = [distributed.new_group([first]) for first in range(size)][rank]
    made = [Muon(Alone(), verbose=False), Muon(model, verbose=False), Muon(list(model.parameters())),
            Muon([{"params": list(model.parameters())}]), Muon(DistributedDataParallel(Alone()), verbose=False),
            Muon(DistributedDataParallel(Alone(), process_group=half), verbose=False)]
    with pytest.raises(UsageError, match="fully_shard"):
        Muon(FullyShardedDataParallel(Alone(), device_id=torch.device("cpu"), use_orig_params=True))
    alone_in_its_group = made[-1]
    alone_in_its_group.param_groups[0]["params"][0].grad = gaussian(7, 5)
    alone_in_its_group.step()
    assert alone_in_its_group.traffic is not None and alone_in_its_group.traffic.bytes_sent == 0
    return [optimizer.traffic is not None for optimizer in made]


def test_the_mode_is_found(worlds: Worlds) -> None:
    assert worlds(2).run(found_modes) == [[False, True, True, True, True, True]] * 2


@pytest.mark.parametrize(("make", "layout"), [(Toy, "fsdp"), (Toy, "hsdp"), (Toy, "tp"), (Alone, "fsdp"),
                                              (Nineteen, "fsdp")])
def test_eight_ranks(worlds: Worlds, make: Any, layout: str) -> None:
    assert_as_alone(worlds(8), layout, Steps(make, steps=20 if make is Nineteen else 3))
