"""Which owners a model gets: by the rule of ``dedicate(mode="auto")``, alike on all ranks, and as ``Muon`` is asked."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from dmuon_tune.errors import DmuonTuneError, UsageError
from dmuon_tune.runtime import Muon, dedicate, no_sync
from dmuon_tune.runtime.dedicated.rule import is_even, sent_over_even

from ..distributed.layouts import mesh_of
from ..distributed.world import Worlds
from ..reference import gaussian
from .stack import WIDTH, Stack, dedicated, loss_of


class Experts(nn.Module):
    """Some matrices in one parameter, which has one owner, and one by itself."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.experts = nn.Parameter(gaussian(count, WIDTH, WIDTH) / 8)
        self.mixer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x + torch.einsum("...i,eji->...j", x, self.experts))


class Mixture(Stack):
    """Units of experts, as many as there are ranks, or one."""

    def __init__(self, blocks: int, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts(count) for _ in range(blocks))
        self.runs = range(blocks)


def plain(size: int) -> nn.Module:
    return Stack()


def tied(size: int) -> nn.Module:
    model = Stack()
    model.blocks[3].weight = model.mixer.weight
    return model


def small(size: int) -> nn.Module:
    return Mixture(size, 1)


def taking_longer(size: int) -> nn.Module:
    """One owner has eight matrices of ten."""
    return Mixture(1, 8)


def chosen(rank: int, size: int, make: Callable[[int], nn.Module]) -> tuple[str, str]:
    """Three lines, and a script around them, that do not depend on what is chosen."""
    model = make(size)
    owned = dedicate(model, mesh_of("fsdp", size), mode="auto")
    fully_shard(model, mesh=mesh_of("fsdp", size), ignored_params=owned)
    optimizer = Muon(model, verbose=False)
    with no_sync(model):
        loss_of(model, rank).backward()
    with optimizer.early_step():
        loss_of(model, rank).backward()
    optimizer.step()
    report = optimizer.report()
    assert report.mode == optimizer.mode == ("dedicated" if owned else "gather")
    assert str(report).splitlines()[-1] == f"{report.mode}: {report.why}"
    return report.mode, report.why


@pytest.mark.parametrize(("size", "make", "mode", "why"), [
    (2, plain, "dedicated", "of a unit one rank sends 2 times"), (4, small, "dedicated", "one rank sends 2.22 times"),
    (4, plain, "gather", "of a unit one rank sends 4 times an even part (at most 3)"),
    (2, taking_longer, "gather", "the slowest owner takes 1.6 times as long as a gathered one (at most 1.25)"),
    (2, tied, "gather", "it is tied to"),
])
def test_auto(worlds: Worlds, size: int, make: Callable[[int], nn.Module], mode: str, why: str) -> None:
    found = worlds(size).run(chosen, make)
    assert len(set(found)) == 1 and found[0][0] == mode and why in found[0][1]
    assert (mode == "gather") == found[0][1].startswith("dedicate left it to gathered owners: ")


def test_a_rule_counts_what_the_busiest_place_sends_and_how_long_the_slowest_owner_takes() -> None:
    first, second, third = (nn.Parameter(torch.zeros(rows, 2)) for rows in (6, 3, 3))
    flat, levels = SimpleNamespace(rows=((0, 1, 2, 3),)), SimpleNamespace(rows=((0, 1), (2, 3)))
    owners = {first: 0, second: 1, third: 2}
    assert sent_over_even([[first, second, third]], owners, flat) == 2.0
    assert sent_over_even([[first], [second, third]], owners, flat) == 4 * 9 / 12
    assert sent_over_even([[first, second, third]], owners, levels) == 2 * 9 / 12
    assert is_even([[first, second, third]], owners, flat, 5.0, 4.0)[0]
    assert not is_even([[first, second, third]], owners, flat, 5.1, 4.0)[0]
    assert not is_even([[first]], owners, flat, 4.0, 4.0)[0]


def asked(rank: int, size: int) -> None:
    """What a model is not."""
    with pytest.raises(UsageError, match=r"mode 'dedicated' is not this model's, which is 'local' \(.*; call dedicate"):
        Muon(Stack(), mode="dedicated", verbose=False)
    with pytest.raises(UsageError, match="mode 'gather' is not this model's, which is 'dedicated'.*without dedicate"):
        Muon(dedicated(size), mode="gather", verbose=False)
    model = Stack()
    assert dedicate(model, mesh_of("fsdp", size), mode="gather") == set()
    fully_shard(model, mesh=mesh_of("fsdp", size))
    with pytest.raises(UsageError, match="which is 'gather' .dedicate left it to gathered owners: it was asked to"):
        Muon(model, mode="dedicated", verbose=False)
    with pytest.raises(UsageError, match="mode 'local' is not this model's, which is 'gather'"):
        Muon(list(model.parameters()), mode="local", verbose=False)
    with pytest.raises(UsageError, match="unknown mode 'both'; choose one of auto, local, gather, dedicated"):
        Muon(model, mode="both", verbose=False)
    assert Muon(model, mode="gather", verbose=False).mode == "gather"
    assert Muon(Stack(), mode="local", verbose=False).mode == "local"
    assert Muon(dedicated(size, mode="auto"), mode="dedicated", verbose=False).mode == "dedicated"
    with pytest.raises(DmuonTuneError, match="unknown mode 'fast'; choose one of dedicated, auto, gather"):
        dedicate(Stack(), mesh_of("fsdp", size), mode="auto" if rank == 0 else "fast")
    with pytest.raises(DmuonTuneError, match="mode is gather on rank 1 and auto on rank 0; give all"):
        dedicate(Stack(), mesh_of("fsdp", size), mode="auto" if rank == 0 else "gather")


def test_a_mode_that_is_asked_for_or_refused(worlds: Worlds) -> None:
    worlds(2).run(asked)


def printed(rank: int, size: int) -> None:
    Muon(dedicated(size, mode="auto", timeout=30.0))


def test_the_table_that_is_printed_says_it(worlds: Worlds) -> None:
    first, second = worlds(2).outcomes(printed)
    assert "\ndedicated: of a unit one rank sends 2 times an even part" in first.output and not second.output
