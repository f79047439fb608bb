"""What is where between and during passes, and ranks whose modules do not do the same."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from dmuon_tune.errors import PeerError, UsageError
from dmuon_tune.runtime import Muon, clip_grad_norm_, no_sync
from dmuon_tune.runtime.distributed.control import Control
from dmuon_tune.runtime.distributed.whole import whole_of

from ..distributed.world import Worlds
from .stack import LAYERS, WIDTH, Stack, dedicated, loss_of


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if whole_of(p) is not None}


def here(model: Stack) -> list[int]:
    """The blocks whose weights have memory."""
    return [place for place, block in enumerate(model.blocks) if is_here(block.weight)]


def is_here(p: Tensor) -> bool:
    return p.untyped_storage().nbytes() >= p.numel() * p.element_size()


def memory(rank: int, size: int) -> tuple[list[list[int]], int]:
    """The blocks that are here as each block runs and as it gets its gradient; elements that this rank keeps."""
    model, seen, memories = dedicated(size), list[list[int]](), list[torch.UntypedStorage]()
    for block in (*model.blocks, model.mixer):
        block.register_forward_pre_hook(lambda block, _: memories.append(block.weight.untyped_storage()))
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: seen.append(here(model)))
        block.weight.register_hook(lambda _: seen.append(here(model)))
    optimizer = Muon(model, verbose=False)
    for step in range(2):
        seen.clear()
        loss = loss_of(model, step)
        assert here(model) == [LAYERS - 1], "the last one stays"
        loss.backward()
        gradients = {name: p.grad for name, p in matrices(model).items()}
        optimizer.step()
        optimizer.zero_grad()
        assert not here(model) and not is_here(model.mixer.weight)
        assert len(memories) == (step + 1) * (LAYERS + 1) and not any(each.nbytes() for each in memories)
    wholes = [whole_of(p) for p in matrices(model).values()]
    for p, whole, gradient in zip(matrices(model).values(), wholes, gradients.values(), strict=True):
        assert p.shape == (WIDTH, WIDTH) and whole.weight.numel() == (WIDTH * WIDTH if whole.is_here else 0)
        held = gradient.untyped_storage().nbytes()
        assert held >= 4 * WIDTH * WIDTH if whole.is_here else held == 4
        assert sum(each.numel() for each in optimizer.state[p]["owned"].values()) == whole.weight.numel()
    return seen, sum(whole.weight.numel() for whole in wholes)


def test_weights_are_here_only_while_they_are_used(worlds: Worlds) -> None:
    found = worlds(3).run(memory)
    assert sum(kept for _, kept in found) == (LAYERS + 1) * WIDTH * WIDTH
    forward = [[place, place + 1] for place in range(LAYERS - 1)] + [[LAYERS - 1]]
    backward = [[place - 1, place] for place in range(LAYERS - 1, 0, -1)] + [[0]]
    for seen, kept in found:
        assert seen == forward + backward
        assert kept == 2 * WIDTH * WIDTH


def looked_at(rank: int, size: int) -> None:
    model = dedicated(size)
    p, optimizer = model.blocks[1].weight, Muon(model, verbose=False)
    assert p.shape == (WIDTH, WIDTH) and p.isnan().all() and p.norm().isnan() and "nan" in repr(optimizer.param_groups)
    assert p.clone().isnan().all() and p.double().isnan().all() and not is_here(p)
    for write in (lambda: p.data.fill_(1), lambda: p.data.add_(1), lambda: nn.init.normal_(p), lambda: p.data_ptr()):
        with contextlib.suppress(RuntimeError):
            write()
        assert p.isnan().all()
    reading = model.head.register_forward_hook(lambda module, given, result: result + p.pow(2).sum())
    assert loss_of(model, 0).isnan()
    reading.remove()


def test_a_weight_that_is_not_here_is_nan(worlds: Worlds) -> None:
    worlds(2).run(looked_at)


def sent(rank: int, size: int, early: bool) -> tuple[list[str], int]:
    """What ranks tell each other in a step, and how many collectives of PyTorch's there are in it."""
    model = dedicated(size)
    optimizer = Muon(model, verbose=False)
    told: list[str] = []
    post = Control.post
    for step in range(3):
        with optimizer.early_step() if early else contextlib.nullcontext():
            loss_of(model, step).backward()
        told.clear()
        Control.post = lambda self, start, what: told.append(what) or post(self, start, what)  # type: ignore[method-assign]
        try:
            with CommDebugMode() as counted:
                optimizer.step()
        finally:
            Control.post = post  # type: ignore[method-assign]
        optimizer.zero_grad()
    return told, counted.get_total_counts()


@pytest.mark.parametrize("early", [False, True])
def test_a_step_sends_no_weight_and_no_gradient(worlds: Worlds, early: bool) -> None:
    for told, collectives in worlds(2).run(sent, early):
        assert told == ["gradients"], "one message of 4 KiB in which ranks agree on the step"
        assert collectives == 0


def reported(rank: int, size: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]], int]:
    model = dedicated(size)
    optimizer = Muon(model, verbose=False)
    optimizer.plan()
    loss_of(model, rank).backward()
    optimizer.step()
    assert optimizer.assignment is not None and optimizer.traffic is not None
    chosen = list(zip(matrices(model), optimizer.assignment.owner, strict=True))
    return [(each.name, each.owner) for each in optimizer.report().matrices], chosen, optimizer.traffic.ns_runs


def test_a_report_names_the_owners(worlds: Worlds) -> None:
    found = worlds(2).run(reported)
    for report, chosen, _ in found:
        assert report == chosen and len({owner for _, owner in chosen}) == 2
    assert sum(runs for *_, runs in found) == LAYERS + 1


def averaged(runs: Sequence[Sequence[int]], steps: int) -> dict[str, Tensor]:
    """The weights that one process moves by the mean of what each rank's gradients are; none of a rank's is 0."""
    model = Stack()
    optimizer = Muon(model, verbose=False)
    for step in range(steps):
        for rank, blocks in enumerate(runs):
            model.runs = blocks
            (loss_of(model, step * len(runs) + rank) / len(runs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def apart(rank: int, size: int, runs: Sequence[Sequence[int]], steps: int) -> dict[str, Tensor]:
    model = dedicated(size)
    model.runs = runs[rank]
    optimizer = Muon(model, verbose=False)
    for step in range(steps):
        loss_of(model, step * size + rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("runs", [
    ([0, 1, 2, 3, 4], [0, 2, 3, 4]), ([0, 1], [1, 2, 3]), ([3, 2, 1], [1, 2, 4]), ([0, 1, 4], [0, 1, 4]), ([], [0, 1]),
], ids=str)
def test_blocks_that_run_on_some_ranks_only_or_in_another_order(worlds: Worlds, runs: tuple[list[int], list[int]]
                                                                 ) -> None:
    wanted = averaged(runs, 3)
    for found in worlds(2).run(apart, runs, 3):
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5, msg=name)


def once_more(rank: int, size: int) -> str:
    """Rank 0 alone runs a block again whose weights are gone."""
    model = dedicated(size, timeout=1.0)
    loss_of(model, 0).backward()
    Muon(model, verbose=False).step()
    model.runs = [0, 1, 2, 0, 3, 4] if rank == 0 else range(LAYERS)
    with pytest.raises(PeerError) as raised:
        loss_of(model, 0).backward()
    return str(raised.value)


def test_a_block_that_runs_twice_on_one_rank_is_an_error_on_all(worlds: Worlds) -> None:
    told = worlds(2).run(once_more)
    assert "weights of blocks.0 once more" in told[0] and ", step 2" in told[0], told


def raised_alone(rank: int, size: int) -> str:
    """A forward that raises on rank 0 alone, which goes on with the next one."""
    model = dedicated(size, timeout=1.0)
    with pytest.raises((PeerError, ZeroDivisionError)) as raised:
        if rank == 0:
            handle = model.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss_of(model, 0)
            handle.remove()
        loss_of(model, 0).backward()
    return f"{type(raised.value).__name__}: {raised.value}"


def test_a_forward_that_breaks_off_on_one_rank_ends_all(worlds: Worlds) -> None:
    for told in worlds(2).run(raised_alone):
        assert told.startswith("PeerError: ")


def killed(rank: int, size: int) -> None:
    model = dedicated(size, timeout=20.0)
    if rank == 1:
        model.blocks[2].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    loss_of(model, 0).backward()


def test_a_rank_that_is_killed_in_a_forward_ends_the_others(worlds: Worlds) -> None:
    first, gone, last = worlds(3).outcomes(killed)
    assert gone.exitcode == -signal.SIGKILL
    for outcome in (first, last):
        assert outcome.status == "raised" and "PeerError" in outcome.error and "rank 1" in outcome.error
        assert ", step 1" in outcome.error, "of the step to come, whichever connection was waited for"
        assert outcome.seconds < 20


class Breaks(torch.autograd.Function):
    """Raises in its backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ZeroDivisionError


def broken_backward(rank: int, size: int) -> dict[str, Tensor]:
    model = dedicated(size)
    optimizer = Muon(model, verbose=False)
    handle = model.blocks[2].register_forward_hook(lambda module, given, result: Breaks.apply(result))
    with pytest.raises(ZeroDivisionError):
        loss_of(model, 99).backward()
    handle.remove()
    optimizer.zero_grad()
    loss_of(model, rank).backward()
    optimizer.step()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def test_a_backward_that_breaks_off_on_all_ranks_leaves_nothing(worlds: Worlds) -> None:
    wanted = averaged([range(LAYERS)] * 2, 1)
    for found in worlds(2).run(broken_backward):
        for name, value in found.items():
            if "blocks" in name or "mixer" in name:  # what FSDP2 leaves of its gradients is its own
                torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5, msg=name)


def broken_later(rank: int, size: int) -> None:
    """A backward that raises after others that have brought gradients, averaged or only added up."""
    model = dedicated(size)
    optimizer = Muon(model, verbose=False)

    def break_off() -> None:
        handle = model.blocks[2].register_forward_hook(lambda module, given, result: Breaks.apply(result))
        with pytest.raises(ZeroDivisionError):
            loss_of(model, 99).backward()
        handle.remove()

    loss_of(model, rank).backward()
    first = {name: p.grad.clone() for name, p in matrices(model).items()}
    break_off()
    assert all(p.grad is not None and p.grad.equal(first[name]) for name, p in matrices(model).items())
    before = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    clip_grad_norm_(model, 1e9)
    optimizer.step()
    assert not any(model.state_dict()[name].full_tensor().equal(before[name]) for name in first)
    break_off()
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, rank).backward()
        found.append([p.grad for p in matrices(model).values()])
    assert all(map(torch.equal, *found)), "nothing comes back after zero_grad"
    optimizer.zero_grad()
    with no_sync(model):
        loss_of(model, rank).backward()
    break_off()
    loss_of(model, rank).backward()
    for use in (optimizer.step, lambda: clip_grad_norm_(model, 1.0)):
        with pytest.raises(UsageError, match="after an exception all of them anew, from zero_grad"):
            use()
    optimizer.zero_grad()
    loss_of(model, rank).backward()
    optimizer.step()


def test_gradients_before_a_backward_that_breaks_off_stay_or_are_refused(worlds: Worlds) -> None:
    worlds(2).run(broken_later)


def freed(rank: int, size: int) -> list[int]:
    found = []
    for _ in range(2):
        model = dedicated(size)
        loss_of(model, rank).backward()
        del model
        gc.collect()
        found.append(len(os.listdir("/proc/self/fd")))
    return found


def test_connections_go_with_the_model(worlds: Worlds) -> None:
    for first, second in worlds(2).run(freed):
        assert first == second


def not_reduced(rank: int, size: int) -> None:
    model = dedicated(size)
    optimizer = Muon(model, verbose=False)
    before = model.blocks[0].weight.grad
    with no_sync(model):
        loss_of(model, 0).backward()
    assert before is None and model.blocks[0].weight.grad is not None
    with pytest.raises(UsageError, match="added up in no_sync alone"):
        clip_grad_norm_(model, 1.0)
    with pytest.raises(UsageError, match="added up in no_sync alone"):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    first = [p.grad.clone() for p in matrices(model).values()]
    optimizer.zero_grad()
    for _ in range(2):  # and what was dropped before takes no part
        with no_sync(model):
            loss_of(model, 0).backward()
        optimizer.zero_grad()
    loss_of(model, 1).backward()
    assert all(map(torch.equal, first, (p.grad for p in matrices(model).values())))


def test_a_step_needs_gradients_of_all_ranks(worlds: Worlds) -> None:
    worlds(2).run(not_reduced)
