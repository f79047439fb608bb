"""What one rank cannot use stops all of them, by name and before anything changes; the next step runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from dmuon_tune.errors import DmuonTuneError, PeerError, UsageError
from dmuon_tune.runtime import Muon, clip_grad_norm_

from .cases import Steps, alone, difference
from .layouts import OPTIONS, Alone, Toy, gradients, local, mesh_of, named, parallel, piece, places_of
from .world import Worlds

Breaks = Callable[[int, Muon, dict[str, nn.Parameter]], None]
WEIGHT = "layers.0.up.weight"


def option(rank: int, optimizer: Muon, parameters: dict[str, nn.Parameter]) -> None:
    if rank == 1:
        optimizer.param_groups[0]["momentum"] = 1.5


def rate(rank: int, optimizer: Muon, parameters: dict[str, nn.Parameter]) -> None:
    if rank == 1:
        optimizer.param_groups[0]["lr"] = 0.5


def lists(rank: int, optimizer: Muon, parameters: dict[str, nn.Parameter]) -> None:
    """What PyTorch's AdamW refuses once it steps."""
    if rank == 1:
        adamw = next(group for group in optimizer.param_groups if not group["use_muon"])
        adamw.update(lr=torch.tensor(1e-3), foreach=True, fused=False)


def absent(rank: int, optimizer: Muon, parameters: dict[str, nn.Parameter]) -> None:
    if rank == 1:
        parameters[WEIGHT].grad = None


def refused(rank: int, size: int, layout: str, breaks: Breaks) -> str:
    """The error of a step that is broken on one rank; its weights are as before, and the next step is right."""
    plan = Steps(steps=1)
    places, model = places_of(Toy, layout, size), parallel(plan.model(), layout, size)
    parameters, optimizer = named(model), plan.optimizer(model)

    def give(step: int) -> None:
        for name, gradient in gradients(plan.shapes(), step).items():
            parameters[name].grad = piece(parameters[name], places[name], gradient)

    plan.run(optimizer, parameters, lambda name, full: piece(parameters[name], places[name], full))
    before = {name: local(p) for name, p in parameters.items()}
    options = [dict(group) for group in optimizer.param_groups]
    give(1)
    breaks(rank, optimizer, parameters)
    with pytest.raises(DmuonTuneError) as raised:
        optimizer.step()
    assert all(torch.equal(local(p), before[name]) for name, p in parameters.items())
    for group, kept in zip(optimizer.param_groups, options, strict=True):
        group.update(kept)
    give(1)
    optimizer.step()
    wanted = alone(Steps(steps=2))
    adamw = {p for group in optimizer.param_groups if not group["use_muon"] for p in group["params"]}
    reasons = [difference(local(p), wanted[name].flatten()[places[name]], p in adamw) for name, p in parameters.items()]
    assert not any(reasons), reasons
    return str(raised.value)


@pytest.mark.parametrize(("layout", "breaks", "text"), [
    ("fsdp", option, "momentum"),
    ("ddp", option, "momentum"),
    ("ddp", rate, "group 0: lr is 0.5 on rank 1 and 0.02 on rank 0"),
    ("fsdp", lists, "AdamW cannot step with these options .RuntimeError: lr as a Tensor"),
    ("ddp", absent, f"{WEIGHT}.*gradient on some ranks only"),
    ("hsdp", absent, f"{WEIGHT}.*gradient on some ranks only"),
])
def test_a_step_that_one_rank_cannot_make(worlds: Worlds, layout: str, breaks: Breaks, text: str) -> None:
    size = 4 if layout == "hsdp" else 2
    found = worlds(size).run(refused, layout, breaks)
    for message in found:
        assert "\n" not in message and re.search(text, message), found


def partly_absent(rank: int, size: int) -> None:
    """FSDP2: a shard that has no gradient counts as 0."""
    plan = Steps(steps=2)
    places, model = places_of(Toy, "fsdp", size), parallel(plan.model(), "fsdp", size)
    parameters, twin = named(model), plan.model()
    optimizer, single = plan.optimizer(model), plan.optimizer(twin)
    for step in range(plan.steps):
        for name, gradient in gradients(plan.shapes(), step).items():
            parameters[name].grad = piece(parameters[name], places[name], gradient)
            if name == WEIGHT:
                gradient = gradient.clone()
                rows = (len(gradient) + size - 1) // size
                gradient[rows : 2 * rows] = 0
                if rank == 1:
                    parameters[name].grad = None
            twin.get_parameter(name).grad = gradient
        optimizer.step()
        single.step()
    assert torch.equal(local(parameters[WEIGHT]), twin.get_parameter(WEIGHT).detach().flatten()[places[WEIGHT]])


def test_a_shard_without_gradient_counts_as_zeros(worlds: Worlds) -> None:
    worlds(3).run(partly_absent)


def partial(rank: int, size: int) -> None:
    """Gradients that are still sums over the ranks, as sequence parallelism leaves those of replicated parameters."""
    mesh = mesh_of("fsdp", size)
    p = nn.Parameter(DTensor.from_local(Alone().weight.detach(), mesh, [Replicate()], run_check=False))
    twin = Alone().weight
    optimizer, single = Muon([p], weight_decay=0.1), Muon([twin], weight_decay=0.1)
    for step in range(2):
        gradient = gradients({"weight": p.shape}, step)["weight"]
        p.grad = DTensor.from_local(gradient * (rank == step), mesh, [Partial()], run_check=False)
        twin.grad = gradient
        optimizer.step()
        single.step()
    assert torch.equal(local(p), twin)


def test_partial_gradients_are_summed(worlds: Worlds) -> None:
    worlds(2).run(partial)


def one_nan(rank: int, size: int) -> tuple[int, bool]:
    plan = Steps(options={"skip_nonfinite": True})
    places, model = places_of(Toy, "fsdp", size), parallel(plan.model(), "fsdp", size)
    parameters, optimizer = named(model), plan.optimizer(model)
    before = {name: local(p) for name, p in parameters.items()}
    for name, gradient in gradients(plan.shapes(), 0).items():
        gradient.view(-1)[0] = float("nan")  # on one rank
        parameters[name].grad = piece(parameters[name], places[name], gradient)
    optimizer.step()
    return optimizer.skipped_steps, all(torch.equal(local(p), before[name]) for name, p in parameters.items())


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(worlds: Worlds) -> None:
    assert worlds(2).run(one_nan) == [(1, True)] * 2


def of_half(rank: int, size: int) -> str:
    half = distributed.new_group([0, 1])
    with pytest.raises(DmuonTuneError) as raised:
        Muon(parallel(Alone(), "fsdp", size), process_group=half, verbose=False).plan()
    return str(raised.value)


def test_a_group_without_ranks_of_the_mesh(worlds: Worlds) -> None:
    messages = worlds(4).run(of_half)
    assert all("process_group" in message for message in messages), messages


def of_other_models(rank: int, size: int) -> list[str]:
    """Errors where one rank leaves a matrix to AdamW, freezes one or has one more."""
    said = []
    for change in ("exclude", "freeze", "add"):
        model = Toy()
        if rank and change == "freeze":
            model.get_parameter(WEIGHT).requires_grad_(False)
        if rank and change == "add":
            model.layers[1].more = nn.Linear(4, 4, bias=False)
        exclude = ("layers.1.down.weight",) if rank and change == "exclude" else ()
        with pytest.raises(DmuonTuneError) as raised:
            Muon(parallel(model, "fsdp", size), **{**OPTIONS, "exclude": exclude}).plan()
        said.append(str(raised.value))
    return said


def test_what_differs_between_the_models_of_ranks_is_named(worlds: Worlds) -> None:
    first, second = worlds(2).run(of_other_models)
    excluded, frozen, added = first
    assert first == second and not any("\n" in each for each in first)
    assert re.match(r"parameters\[\d+\] is .* on rank 1 and .*'layers.1.down.weight' on rank 0; give all", excluded)
    assert frozen.startswith(f"parameter '{WEIGHT}': requires_grad is False on rank 1 and True on rank 0; give all")
    assert re.match(r"parameters\[\d+\] is .*'layers.1.more.weight' on rank 1 and .* on rank 0; give all", added)


def plain(rank: int, size: int) -> Tensor:
    """Parameters that are whole on every rank, without a module that says so."""
    weights = [nn.Parameter(Alone().weight.detach().clone()) for _ in range(3)]
    optimizer = Muon(weights, process_group=distributed.group.WORLD)
    for step in range(2):
        for index, p in enumerate(weights):
            p.grad = gradients({str(index): p.shape}, step)[str(index)]
        optimizer.step()
    assert optimizer.traffic is not None and optimizer.traffic.ns_runs == 2
    return torch.stack([p.detach() for p in weights])


def test_plain_parameters_of_a_given_group(worlds: Worlds) -> None:
    first, *others = worlds(3).run(plain)
    weights = [nn.Parameter(Alone().weight.detach().clone()) for _ in range(3)]
    optimizer = Muon(weights)
    for step in range(2):
        for index, p in enumerate(weights):
            p.grad = gradients({str(index): p.shape}, step)[str(index)]
        optimizer.step()
    for found in (first, *others):
        assert torch.equal(found, torch.stack([p.detach() for p in weights]))


OF_GROUPS = {
    "lr": 0.5, "weight_decay": 0.3, "momentum": 0.5, "nesterov": False, "cautious": True, "scale": "moonlight",
    "momentum_form": "ema", "maximize": True, "betas": (0.5, 0.5), "eps": 0.1,
}
OF_ALL = {
    "bucket_bytes": 100, "eps": 1.0, "momentum_dtype": "bfloat16", "ns_dtype": "bfloat16", "skip_nonfinite": True,
    "profile": True, "steps": 3, "coefficients": "jordan", "restarts": (1,),
}


def options_that_differ(rank: int, size: int) -> list[tuple[str, str]]:
    """(Option, error) where the last rank has another value of it: at a later step, and from the start."""
    weights = [nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(6))]
    groups = [{"params": weights[:1]}, {"params": weights[1:], "use_muon": False}]
    optimizer, said = Muon(groups, process_group=distributed.group.WORLD), []

    def step() -> None:
        for p in weights:
            p.grad = torch.ones_like(p)
        optimizer.step()

    step()
    before = [p.detach().clone() for p in weights]
    for name, value in OF_GROUPS.items():
        group = optimizer.param_groups[name in ("betas", "eps")]
        kept, group[name] = group[name], value if rank == size - 1 else group[name]
        with pytest.raises(DmuonTuneError) as raised:
            step()
        group[name] = kept
        said.append((name, str(raised.value)))
    assert all(torch.equal(p, old) for p, old in zip(weights, before, strict=True))
    step()
    for name, value in OF_ALL.items():
        with pytest.raises(DmuonTuneError) as raised:
            Muon(groups, process_group=distributed.group.WORLD, **{name: value} if rank == size - 1 else {}).plan()
        said.append((name, str(raised.value)))
    return said


def test_an_option_that_differs_on_one_rank_is_named(worlds: Worlds) -> None:
    first, *others = worlds(3).run(options_that_differ)
    assert others == [first] * 2
    for option, error in first:
        assert re.search(rf"\b{option} is .* on rank 2 and .* on rank 0", error), (option, error)


def never_there(rank: int, size: int) -> str:
    """Some ranks alone make and use an optimizer of all."""
    group = distributed.new_group(range(size))
    if rank % 2:
        return ""
    with pytest.raises(PeerError) as raised:
        Muon(parallel(Alone(), "fsdp", size), process_group=group, timeout=1, verbose=False).plan()
    return str(raised.value)


def test_ranks_that_do_not_come_to_the_first_call_are_named(worlds: Worlds) -> None:
    first, _, third, _ = worlds(4).run(never_there)
    assert first == third and "\n" not in first
    assert first.startswith("waited 1 s") and "not arrived: ranks 1, 3;" in first and "process_group=" in first


def of_the_other(rank: int, size: int) -> str:
    group = distributed.new_group([0])
    if rank == 0:
        return ""
    with pytest.raises(UsageError) as raised:
        Muon([Alone().weight], process_group=group)
    with pytest.raises(UsageError, match="this rank"):
        clip_grad_norm_(Alone(), 1.0, process_group=group)
    return str(raised.value)


def test_a_group_without_this_rank(worlds: Worlds) -> None:
    assert "this rank" in worlds(2).run(of_the_other)[1]


@pytest.mark.parametrize("timeout", [0, -1, 1e-400, 1e30, float("nan"), float("inf"), "60", True, None])
def test_a_timeout_that_no_wait_can_have(timeout: Any) -> None:
    with pytest.raises(UsageError, match="timeout must be"):
        Muon([Alone().weight], timeout=timeout)
