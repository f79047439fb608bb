"""Faults of one rank while a model trains: every rank ends and says why, and the last checkpoint resumes to the bit."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict

from ... import forked
from .cases import Held, Steps, alone, assert_equal
from .layouts import held
from .test_resume import load, start, step
from .world import Worlds

KEPT = 2  # steps that the checkpoint has seen; rank 1's fault comes before the next
PLAN = Steps(steps=KEPT, options={"timeout": 20.0})
NEXT = replace(PLAN, steps=1)
LATE_S = 30  # of a rank whose host or disk is slow


@contextmanager
def little_room() -> Iterator[None]:
    """A disk on which this process can write a few bytes a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def trained(rank: int, size: int, fault: str, folder: str, plan: Steps = PLAN, late_s: float = 3) -> Held:
    """Two steps, a checkpoint, a fault of rank 1 or a late rank 0, and another step: this rank's weights then."""
    model, optimizer, parameters, places = start(plan, "fsdp", size)
    step(plan, optimizer, parameters, places, 0)
    weights, state = get_state_dict(model, optimizer)
    checkpoint = {"model": weights, "optimizer": state}
    dcp.save(checkpoint, checkpoint_id=folder)
    if fault == "full disk":
        with pytest.raises(CheckpointException) as raised, little_room() if rank == 1 else nullcontext():
            dcp.save(checkpoint, checkpoint_id=f"{folder}.second")
        assert list(raised.value.failures) == [1]
    elif fault == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "interrupted" and rank == 1:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()  # while it waits for rank 0
    elif fault in ("slow", "interrupted") and rank == 0:
        time.sleep(late_s)
    step(NEXT, optimizer, parameters, places, KEPT)
    return held(parameters, places)


def resumed(rank: int, size: int, folder: str) -> Held:
    model, optimizer, parameters, places = start(NEXT, "fsdp", size)
    load(model, optimizer, folder)
    step(NEXT, optimizer, parameters, places, KEPT)
    return held(parameters, places)


def check_resumes(worlds: Worlds, folder: Path) -> None:
    """What ``trained`` has saved goes on, on two ranks."""
    ranks = worlds(2).run(resumed, str(folder))
    assert_equal(NEXT, ranks, alone(replace(PLAN, steps=KEPT + 1)), "resumed on 2")


def test_a_killed_rank_ends_all_and_the_checkpoint_resumes(worlds: Worlds, tmp_path: Path) -> None:
    first, killed, last = worlds(3).outcomes(trained, "killed", str(tmp_path))
    assert killed.exitcode == -signal.SIGKILL
    for outcome in (first, last):
        assert outcome.status == "raised" and "PeerError" in outcome.error and outcome.seconds < 20
        assert f"step {KEPT + 1}; not arrived: rank 1" in outcome.error
    check_resumes(worlds, tmp_path)


def test_an_interrupted_rank_tells_the_others(worlds: Worlds, tmp_path: Path) -> None:
    first, interrupted, last = worlds(3).outcomes(trained, "interrupted", str(tmp_path))
    assert "KeyboardInterrupt" in interrupted.error
    for outcome in (first, last):
        assert outcome.status == "raised" and "rank 1 failed: KeyboardInterrupt" in outcome.error


@pytest.mark.parametrize("fault", ["slow", "full disk"])
def test_what_is_no_reason_to_stop(worlds: Worlds, tmp_path: Path, fault: str) -> None:
    """A rank that is late, and a checkpoint that one rank has no room for."""
    ranks = worlds(3).run(trained, fault, str(tmp_path / "checkpoint"))
    assert_equal(NEXT, ranks, alone(replace(PLAN, steps=KEPT + 1)), fault)


@pytest.mark.slow
def test_a_rank_that_is_late_by_less_than_the_timeout_is_waited_for(worlds: Worlds, tmp_path: Path) -> None:
    patient = replace(PLAN, options={"timeout": 2.0 * LATE_S})
    began = time.monotonic()
    ranks = worlds(3).run(trained, "slow", str(tmp_path), patient, LATE_S, timeout=3 * LATE_S)
    assert time.monotonic() - began > LATE_S
    assert_equal(NEXT, ranks, alone(replace(PLAN, steps=KEPT + 1)), "waited for")


@pytest.mark.slow
def test_a_rank_that_is_late_by_more_is_named_and_the_checkpoint_resumes(worlds: Worlds, tmp_path: Path) -> None:
    hasty = replace(PLAN, options={"timeout": LATE_S / 3})
    late, *waited = worlds(3).outcomes(trained, "slow", str(tmp_path), hasty, LATE_S, timeout=3 * LATE_S)
    why = f"waited {LATE_S / 3:g} s for gradients, step {KEPT + 1}; not arrived: rank 0"
    for outcome in waited:
        assert outcome.status == "raised" and outcome.error.endswith(why)
        assert outcome.seconds < LATE_S, "ended before the late rank came"
    # Whose time is over first tells the others.
    assert any(outcome.error.endswith(f"PeerError: {why}") for outcome in waited)
    assert late.status == "raised" and late.seconds < LATE_S + 5 and late.error.endswith(f"failed: {why}")
    check_resumes(worlds, tmp_path)


SCRIPT = """
import sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from dmuon_tune.runtime import Muon

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16))
optimizer = Muon(fully_shard(model), timeout=float(sys.argv[1]), verbose=False, include=["*"])
for step in range(4):
    if dist.get_rank() == 1 and step == 2:
        exec(sys.argv[2])
    if sys.argv[3:]:
        model(torch.ones(1, 16)).sum().backward()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
"""


def ended(folder: Path, timeout_s: float, fault: str, *computes: str) -> list[tuple[int, str]]:
    """Exit code and last line of each of two ranks that run the script; ``fault`` is what rank 1 does between steps,
    which have a forward and a backward where it ``computes``."""
    program = folder / "train.py"
    program.write_text(SCRIPT)
    ranks = forked.run_ranks(2, str(program), str(timeout_s), fault, *computes, environ=os.environ, folder=folder)
    return [(rank.returncode, rank.stderr.strip().rpartition("\n")[2]) for rank in ranks]


def test_a_script_that_raises_between_steps_tells_the_others_why(tmp_path: Path) -> None:
    first, second = ended(tmp_path, 30, 'raise ValueError("no more data")')
    assert second[0] == 1 and second[1].endswith("ValueError: no more data")
    assert first[0] == 1 and first[1].endswith("PeerError: rank 1 failed: ValueError: no more data")


@pytest.mark.parametrize(("fault", "why"), [
    ('raise ValueError("no more data")', "rank 1 failed: ValueError: no more data"),
    ("import os; os.kill(os.getpid(), 9)",
     "a connection was closed outside of the optimizer, after step 2; gone: rank 1"),
])
def test_a_forward_that_loses_a_rank_says_which_and_why(tmp_path: Path, fault: str, why: str) -> None:
    """FSDP2's transfer ends in gloo's own words, which have neither; ours come last."""
    first, second = ended(tmp_path, 30, fault, "computes")
    assert first == (1, f"this rank ended because {why}") and second[0] in (1, -signal.SIGKILL)


@pytest.mark.slow
def test_a_script_whose_rank_is_late_ends_on_all_ranks(tmp_path: Path) -> None:
    first, late = ended(tmp_path, LATE_S / 3, f"time.sleep({LATE_S})")
    why = f"waited {LATE_S / 3:g} s for gradients, step 3; not arrived: rank 1"
    assert first[0] == 1 and first[1].endswith(f"PeerError: {why}")
    assert late[0] == 1 and late[1].endswith(f"PeerError: rank 0 failed: {why}")
