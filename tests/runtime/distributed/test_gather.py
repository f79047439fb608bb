"""What happens around steps over shards: parameters that come later, state of one process, reports, refusals."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dmuon_tune.errors import PeerError, UsageError
from dmuon_tune.runtime import Muon
from dmuon_tune.runtime.distributed import gather

from ..reference import gaussian
from . import layouts
from .world import Worlds


def pair(rows: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, rows, bias=False), nn.Linear(rows, 6, bias=False))


def give(model: nn.Module, step: int) -> None:
    for p in model.parameters():
        gradient = gaussian(*p.shape, seed=step)
        if isinstance(p, DTensor):
            rows = -(-len(gradient) // p.device_mesh.size())
            start = p.device_mesh.get_local_rank() * rows
            local = gradient[start : start + rows]
            gradient = DTensor.from_local(local, p.device_mesh, p.placements, run_check=False, shape=p.shape,
                                          stride=p.stride())
        p.grad = gradient


def case_parameters_that_come_later(rank: int, size: int) -> list[bool]:
    """A group that is added between steps: what has an owner keeps it."""
    first, second = pair(8), pair(10)
    twins = copy.deepcopy((first, second))
    for model in (first, second):
        fully_shard(model)
    optimizer, single = Muon(first, verbose=False), Muon(twins[0], verbose=False)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": list(second.named_parameters("later"))})
            single.add_param_group({"params": list(twins[1].named_parameters("later"))})
        for model in (first, second, *twins):
            give(model, step)
        optimizer.step()
        single.step()
    return [torch.equal(p.full_tensor(), twin) for model, whole in zip((first, second), twins, strict=True)
            for p, twin in zip(model.parameters(), whole.parameters(), strict=True)]


def case_state_of_one_process(rank: int, size: int) -> list[bool]:
    """A state dict of whole tensors, as torch.load gives it; none is left whole but on its owner."""
    twin = layouts.Toy()
    single = Muon(twin, **layouts.OPTIONS)
    give(twin, 0)
    single.step()
    model = layouts.Toy()
    model.load_state_dict(twin.state_dict())
    layouts.parallel(model, "fsdp", size)
    optimizer = Muon(model, **layouts.OPTIONS)
    optimizer.load_state_dict(copy.deepcopy(single.state_dict()))
    for each, its in ((twin, single), (model, optimizer)):
        give(each, 1)
        its.step()
    names = single.param_groups[0]["param_names"]
    return [torch.equal(dict(model.named_parameters())[name].full_tensor(), twin.get_parameter(name)) for name in names]


def case_report(rank: int, size: int) -> tuple[list[Any], str]:
    model = pair(8)
    fully_shard(model)
    optimizer = Muon(model, verbose=False)
    assert all(matrix.update_rms is None for matrix in optimizer.report().matrices)
    give(model, 0)
    optimizer.step()
    report = optimizer.report(spectra=True)
    assert str(report).splitlines()[0].split()[-1] == "owner"
    with pytest.raises(UsageError, match="save its state_dict"):
        pickle.dumps(optimizer)
    return [(each.name, each.owner, each.update_rms, each.sigma_max) for each in report.matrices], str(report)


def case_errors_that_change_nothing(rank: int, size: int) -> list[str]:
    """Of one rank in a report, a checkpoint and its loading, and of all where a step's kernels are decided."""
    def broken(*arguments: Any) -> Any:
        raise MemoryError("no room")

    model = pair(8)
    fully_shard(model)
    optimizer = Muon(model, verbose=False)
    give(model, 0)
    optimizer.step()
    kept, said = optimizer.state_dict(), []
    calls = (
        (gather, "report", optimizer.report), (gather, "like", optimizer.state_dict),
        (gather.Gather, "_placed", lambda: optimizer.load_state_dict(kept)),
    )
    for owner, name, call in calls:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(owner, name, broken)
            with pytest.raises((MemoryError, PeerError)) as raised:
                call()
        said.append(str(raised.value))
    optimizer.param_groups[0]["nesterov"] = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather.Agreement, "prepare", broken)
        for _ in range(2):  # what was not decided is not run the second time either
            with pytest.raises(MemoryError):
                optimizer.step()
    optimizer.step()
    return said


def case_options_that_differ(rank: int, size: int) -> list[bool]:
    """Equal matrices of groups whose momentum, and update, are made otherwise, in the rounds of one batch."""
    found = []
    models = [nn.Sequential(*(nn.Linear(6, 8, bias=False) for _ in range(7))) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for layer in models[0]:
        fully_shard(layer)
    optimizers = []
    for model in models:
        p = list(model.parameters())
        optimizers.append(Muon([
            {"params": p[:2], "momentum": 0.5}, {"params": p[2:4], "nesterov": False, "lr": torch.tensor(0.1)},
            {"params": p[4:6], "cautious": True, "weight_decay": 0.2}, {"params": p[6:], "momentum_form": "ema"},
        ]))
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.param_groups[3]["momentum"] = 0.9 + 0.02 * step
            give(model, step)
            optimizer.step()
        found += [torch.equal(p.full_tensor(), twin)
                  for p, twin in zip(models[0].parameters(), models[1].parameters(), strict=True)]
    return found


def test_parameters_that_come_later_state_of_one_process_and_options_that_differ(worlds: Worlds) -> None:
    for case in (case_parameters_that_come_later, case_state_of_one_process, case_options_that_differ):
        for equal in worlds(2).run(case):
            assert equal and all(equal)


def test_errors_that_change_nothing_are_raised_on_all_ranks_and_all_go_on(worlds: Worlds) -> None:
    first, second = worlds(2).run(case_errors_that_change_nothing)
    assert second == ["no room"] * 3 and all("rank 1 failed: MemoryError: no room" in text for text in first)


def test_a_report_is_the_same_on_all_ranks(worlds: Worlds) -> None:
    (matrices, text), other = worlds(2).run(case_report)
    assert (matrices, text) == other
    assert [matrix[0] for matrix in matrices] == ["0.weight", "1.weight"]
    assert {owner for _, owner, _, _ in matrices} == {0, 1}
    assert all(0 < rms < 0.1 and 0.5 < sigma < 1.5 for _, _, rms, sigma in matrices)


def test_flat_parameters_are_refused() -> None:
    class FullyShardedDataParallel(nn.Linear):
        """By name alone, so that it is not imported."""

    with pytest.raises(UsageError, match="fully_shard"):
        Muon(nn.Sequential(FullyShardedDataParallel(4, 4)), verbose=False)
