"""The harness itself: results and tracebacks from every rank, a hang shown and ended, and a world that goes on."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import distributed

from .world import Worlds


def summed(rank: int, size: int, weight: float) -> tuple[int, float, int]:
    total = torch.tensor([weight * rank])
    distributed.all_reduce(total)
    return os.getpid(), float(total), torch.get_num_threads()


def one_raises(rank: int, size: int) -> None:
    print(f"rank {rank} begins")
    if rank == 1:
        raise ValueError("rank 1 has a reason")
    distributed.barrier()


def one_hangs(rank: int, size: int) -> int:
    if rank == 1:
        time.sleep(600)
    return rank


def one_is_killed(rank: int, size: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def variable(rank: int, size: int) -> str | None:
    return os.environ.get("DMUON_TUNE_ON_MISS")


def test_cases_share_a_worlds_processes(worlds: Worlds) -> None:
    first, again = (worlds(2).run(summed, weight) for weight in (1.0, 5.0))
    assert [total for _, total, _ in first + again] == [1.0, 1.0, 5.0, 5.0]
    assert len({pid for pid, _, _ in first}) == 2 and [found[0] for found in first] == [found[0] for found in again]
    assert {threads for *_, threads in first} == {1}


def test_variables_of_a_test_reach_its_case(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMUON_TUNE_ON_MISS", "error")
    assert worlds(2).run(variable) == ["error", "error"]
    monkeypatch.delenv("DMUON_TUNE_ON_MISS")
    assert worlds(2).run(variable) == [None, None]


@pytest.mark.parametrize(("case", "status", "text"), [
    (one_raises, ["hung", "raised"], "ValueError: rank 1 has a reason"),
    (one_hangs, ["ok", "hung"], "one_hangs"),
    (one_is_killed, ["ok", "died"], "exit code -9"),
])
def test_a_rank_that_fails_is_shown_and_the_next_case_runs(worlds: Worlds, case: Any, status: list[str], text: str
                                                           ) -> None:
    worlds(2).run(summed, 1.0)  # started before the timeout begins
    found = worlds(2).outcomes(case, timeout=3, grace=0.5)
    assert [outcome.status for outcome in found] == status
    assert text in found[1].error + found[1].details
    if case is one_raises:
        assert "rank 1 begins" in found[1].output and "barrier" in found[0].details
    worlds(2).run(summed, 1.0)
