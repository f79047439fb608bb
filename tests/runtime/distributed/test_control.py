"""Agreement, timeouts and faults among real gloo processes: whatever goes wrong, every rank says what and ends."""

from __future__ import annotations

import os
import signal
import time
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dmuon_tune.errors import PeerError, UsageError
from dmuon_tune.runtime.distributed.control import MESSAGE_BYTES, Control
from dmuon_tune.runtime.distributed.options import check_alike

from .world import Worlds

SHORT_S = 2.0


@cache
def control() -> Control:
    """One for all cases that leave it whole."""
    return Control()


def said_by(call: Any) -> str:
    """The error of a call that must fail."""
    with pytest.raises((PeerError, UsageError)) as raised:
        call()
    return f"{type(raised.value).__name__}: {raised.value}"


def agreement(rank: int, size: int) -> dict[str, Any]:
    """Every call that ends well, and those whose errors leave the group whole."""
    ours = control()
    ours.step = 7
    long = [0] * (MESSAGE_BYTES + 10)
    long[MESSAGE_BYTES + rank] = long[rank] = rank + 1
    found: dict[str, Any] = {
        "flags": ours.agree("step", [rank, size - rank, 0]),
        "none": ours.agree("step"),
        "long": ours.agree("step", long),
        "decided": ours.decide(lambda: {"of": os.getpid(), "é": [1, (2, 3)]}, "plan"),
        "gathered": ours.gather({"rank": "x" * rank}, "failures"),
        "raised": said_by(
            lambda: ours.agree("step", error=UsageError("layer.weight: is sparse") if rank in (1, 2) else None)
        ),
        "undecided": said_by(lambda: ours.decide(lambda: broken(), "plan")),
        "elsewhere": said_by(lambda: ours.agree("state_dict" if rank == 0 else "step")),
        "uncounted": said_by(lambda: ours.agree("step", [0] * (1 + rank))),
        "differ": (ours.differ({"shapes": [rank // 2]}, "parameters"), ours.differ({"shapes": [3]}, "parameters")),
        "alike": said_by(lambda: check_alike({"shapes": [{"name": "w", "shape": [rank // 2]}], "a": 1}, ours)),
    }
    if rank == 2:
        time.sleep(1.3)  # longer than the others wait before they look around
    work = dist.all_reduce(torch.ones(3), async_op=True)
    ours.wait(work, "gradients")
    exchange(ours)
    ours.step += 1
    return {**found, "after": ours.agree("step", [rank])}


def of_some(rank: int, size: int) -> list[list[int]]:
    """Groups whose ranks have been in different numbers of others; two controls of one."""
    dist.new_group([0, 1, 2])
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    return [Control(pairs[rank // 2], timeout=30).gather([rank], "ranks") for _ in range(2)]


def broken() -> Any:
    raise UsageError("no such preset")


def test_what_all_ranks_agree_on(worlds: Worlds) -> None:
    found = worlds(4).run(agreement)
    for rank, answers in enumerate(found):
        assert answers["flags"] == [3, 4, 0] and answers["none"] == [] and answers["after"] == [3]
        long = answers["long"]
        assert len(long) == MESSAGE_BYTES + 10
        assert long[:4] == long[MESSAGE_BYTES : MESSAGE_BYTES + 4] == [1, 2, 3, 4] and sum(long) == 20
        assert answers["decided"] == found[0]["decided"] and answers["decided"]["é"] == [1, [2, 3]]
        assert answers["gathered"] == [{"rank": "x" * other} for other in range(4)]
        own = "UsageError: layer.weight: is sparse"
        assert answers["raised"] == (
            own if rank in (1, 2) else f"PeerError: rank 1 failed: {own} (step, step 7; rank 2 failed too)"
        )
        own = "UsageError: no such preset"
        assert answers["undecided"] == (own if rank == 0 else f"PeerError: rank 0 failed: {own} (plan, step 7)")
        assert "rank 0: state_dict, step 7; ranks 1-3: step, step 7" in answers["elsewhere"]
        assert "rank 0: step, step 7, 1 flag; rank 1: step, step 7, 2 flags; rank 2" in answers["uncounted"]
        assert answers["differ"] == (True, False)
        assert answers["alike"] == "UsageError: w: shape is [1] on rank 2 and [0] on rank 0; give all ranks the same"


def test_groups_of_some_ranks(worlds: Worlds) -> None:
    found = worlds(4).run(of_some)
    assert found == [[[[0], [1]]] * 2] * 2 + [[[[2], [3]]] * 2] * 2


def one_killed(rank: int, size: int) -> None:
    ours = Control(timeout=30)
    ours.agree("step")
    ours.step += 1
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    exchange(ours)


def exchange(ours: Control) -> None:
    sizes, what = [2] * ours.size, "gradients of round 2"
    given, into = torch.full((sum(sizes),), float(ours.rank)), torch.empty(sum(sizes))
    ours.wait(ours.all_to_all(into, given, sizes, sizes, what), what, torch.device("cpu"))
    assert into.tolist() == [float(rank) for rank in range(ours.size) for _ in range(2)]


def one_raises(rank: int, size: int) -> None:
    """In the middle of a step, while the others wait for its part."""
    ours = Control(timeout=30)
    with ours.guard("step"):
        if rank == 2:
            raise MemoryError("no room for round 2")
        exchange(ours)


def one_stays_away(rank: int, size: int) -> str:
    """Alive, but busy elsewhere for longer than the timeout; a later call does not wait again."""
    ours = Control(timeout=SHORT_S)
    ours.agree("step")
    if rank == 0:
        time.sleep(3 * SHORT_S)
        return said_by(lambda: ours.agree("checkpoint"))
    with pytest.raises(PeerError) as raised:
        ours.agree("step")
    began = time.monotonic()
    assert said_by(lambda: ours.agree("step")) == f"PeerError: {raised.value}" and time.monotonic() - began < 0.5
    return str(raised.value)


def test_a_killed_rank_ends_the_others_wait(worlds: Worlds) -> None:
    first, killed, last = worlds(3).outcomes(one_killed)
    assert (killed.status, killed.exitcode) == ("died", -signal.SIGKILL)
    for outcome in (first, last):
        assert outcome.status == "raised" and outcome.seconds < 15
        assert "PeerError" in outcome.error and "gradients of round 2, step 1; not arrived: rank 1" in outcome.error


def test_a_rank_that_raises_in_a_step_tells_the_others(worlds: Worlds) -> None:
    *others, failed = worlds(3).outcomes(one_raises)
    assert failed.error == "MemoryError: no room for round 2"
    for outcome in others:
        assert outcome.status == "raised" and outcome.seconds < 15
        assert outcome.error.endswith(
            "PeerError: rank 2 failed: MemoryError: no room for round 2 (step, step 0)"
        )


def test_a_wait_ends_at_its_timeout_and_names_who_did_not_arrive(worlds: Worlds) -> None:
    absent, *waited = worlds(3).run(one_stays_away)
    for error in waited:
        assert error.endswith("waited 2 s for step, step 0; not arrived: rank 0")
    assert "failed: waited 2 s for step, step 0; not arrived: rank 0" in absent


def comes_too_late(rank: int, size: int) -> tuple[str, float]:
    """To the first call of all, when the other has given up."""
    began = time.monotonic()
    if rank == 1:
        time.sleep(2 * SHORT_S)
    return said_by(lambda: Control(timeout=SHORT_S)), time.monotonic() - began


def test_a_rank_that_comes_to_the_first_call_too_late_hears_why_at_once(worlds: Worlds) -> None:
    waited, late = worlds(2).outcomes(comes_too_late)
    assert waited.status == late.status == "ok" and not waited.output, "nothing is logged at each look"
    reason = waited.value[0].removeprefix("PeerError: ")
    assert reason.startswith("waited 2 s for all ranks") and "not arrived: rank 1;" in reason
    assert late.value[0] == f"PeerError: rank 0 failed: {reason}" and late.value[1] < 3 * SHORT_S
