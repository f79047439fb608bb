"""Faults of one rank while a model trains: every rank ends and says why, and the last checkpoint resumes to the bit."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed import TCPStore
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict

from .cases import Held, Steps, alone, assert_equal
from .layouts import held
from .test_resume import load, start, step
from .world import ROOT, Worlds

KEPT = 2  # steps that the checkpoint has seen; rank 1's fault comes before the next
PLAN = Steps(steps=KEPT, options={"timeout": 20.0})
NEXT = replace(PLAN, steps=1)


@contextmanager
def little_room() -> Iterator[None]:
    """A disk on which this process can write a few bytes a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def trained(rank: int, size: int, fault: str, folder: str) -> Held:
    """Two steps, a checkpoint, a fault of rank 1 and another step, after which this rank's weights are returned."""
    model, optimizer, parameters, places = start(PLAN, "fsdp", size)
    step(PLAN, optimizer, parameters, places, 0)
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
        time.sleep(3)
    step(NEXT, optimizer, parameters, places, KEPT)
    return held(parameters, places)


def resumed(rank: int, size: int, folder: str) -> Held:
    model, optimizer, parameters, places = start(NEXT, "fsdp", size)
    load(model, optimizer, folder)
    step(NEXT, optimizer, parameters, places, KEPT)
    return held(parameters, places)


def test_a_killed_rank_ends_all_and_the_checkpoint_resumes(worlds: Worlds, tmp_path: Path) -> None:
    wanted = alone(replace(PLAN, steps=KEPT + 1))
    first, killed, last = worlds(3).outcomes(trained, "killed", str(tmp_path))
    assert killed.exitcode == -signal.SIGKILL
    for outcome in (first, last):
        assert outcome.status == "raised" and "PeerError" in outcome.error and outcome.seconds < 20
        assert f"step {KEPT + 1}; not arrived: rank 1" in outcome.error
    assert_equal(NEXT, worlds(2).run(resumed, str(tmp_path)), wanted, "resumed on 2")


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


SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from dmuon_tune.runtime import Muon

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16))
optimizer = Muon(fully_shard(model), timeout=30, verbose=False, include=["*"])
for step in range(4):
    if dist.get_rank() == 1 and step == 2:
        raise ValueError("no more data")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
"""


def test_a_script_that_raises_between_steps_tells_the_others_why(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent keeps one
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = [
        subprocess.Popen([sys.executable, tmp_path / "train.py"], stderr=subprocess.PIPE, text=True,
                         env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    first, second = (process.communicate(timeout=60)[1] for process in ranks)
    assert [process.returncode for process in ranks] == [1, 1]
    assert second.strip().endswith("ValueError: no more data")
    assert first.strip().endswith("PeerError: rank 1 failed: ValueError: no more data")
