"""Many processes on one cache file, and processes killed inside its commits: counts what was lost or broken.

python tools/stress_cache.py writers --processes 16 --seconds 60
python tools/stress_cache.py kills --kills 200
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _runner import Parser, run

from dmuon_tune.cache import Layers, Store, TuningKey
from dmuon_tune.device import DeviceFingerprint, Toolchain
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.words import counted

FORK = multiprocessing.get_context("fork")  # what it imported is there at once
DEVICE = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 62914560, 150_000_000_000)
TOOLCHAIN = Toolchain("tilelang", (("tilelang", "0.1.15"),))
PROBLEMS = [Problem("gram", 8, m, m, 4096) for m in (64, 128, 256)]
KEYS = [TuningKey(problem, "gram.tilelang", "ab" * 32, DEVICE, TOOLCHAIN) for problem in PROBLEMS]
CONFIGS = 40
MOST_DELAY_S = 0.02  # from a process's first result to its end

Best = dict[tuple[int, int], float]  # (key, configuration) → its least time in microseconds


def result_of(median_us: float) -> Measurement:
    return Measurement.from_samples([median_us] * 30, 1e-3, {"registers": 96})


def write_and_read(path: Path, seed: int, until: float, answer: Connection) -> None:
    """Record random results and read them until ``until``; answers (what was recorded, what went wrong)."""
    random.seed(seed)
    best: Best = {}
    counts = {"written": 0, "read": 0}
    try:
        while not counts["written"] or time.monotonic() < until:
            with Store.open_user(path) as store:
                for _ in range(10):
                    key, config = random.randrange(len(KEYS)), random.randrange(CONFIGS)
                    median_us = random.uniform(1, 99)
                    store.record(KEYS[key], {"block": config}, result_of(median_us), {"by": seed})
                    best[key, config] = min(median_us, best.get((key, config), median_us))
                    counts["written"] += 1
            with Layers.open({"HOME": "/nonexistent", "DMUON_TUNE_CACHE_PATH": str(path)}) as layers:
                for _ in range(5):
                    found = layers.entries(random.choice(KEYS).problem, DEVICE)
                    counts["read"] += len(found) <= 1
        answer.send((best, counts, ""))
    except BaseException as error:
        answer.send((best, counts, f"{type(error).__name__}: {error}"))


def writers(path: Path, processes: int, seconds: float) -> dict[str, Any]:
    """How many results so many processes wrote and read at once, and what is wrong with what was kept."""
    until = time.monotonic() + seconds
    pipes, running = [], []
    for seed in range(processes):
        ours, theirs = FORK.Pipe()
        running.append(FORK.Process(target=write_and_read, args=(path, seed, until, theirs)))
        running[-1].start()
        pipes.append(ours)
    answers = [pipe.recv() for pipe in pipes]
    for process in running:
        process.join()
    expected: Best = {}
    for best, _, _ in answers:
        for what, median_us in best.items():
            expected[what] = min(median_us, expected.get(what, median_us))
    return {
        "processes": processes, "seconds": seconds,
        "written": sum(counts["written"] for _, counts, _ in answers),
        "read": sum(counts["read"] for _, counts, _ in answers),
        "faults": [fault for _, _, fault in answers if fault] + faults_of(path, expected),
    }


def faults_of(path: Path, expected: Best) -> list[str]:
    """What a file does not hold of this, or holds wrongly."""
    faults = integrity_faults(path)
    with Store.open(path, read_only=True) as store:
        for number, key in enumerate(KEYS):
            wanted = {config: median_us for (of, config), median_us in expected.items() if of == number}
            kept = {trial.config["block"]: trial.measurement.median_us for trial in store.trials(key)}
            if kept != wanted:
                count = counted(len(wanted), "result")
                faults.append(f"key {number}: expected {count}, kept {len(kept)}, or another time of one")
            winner = store.best(key)
            if wanted and (winner is None or winner.measurement.median_us != min(wanted.values())):
                faults.append(f"key {number}: the winner is not the fastest")
    return faults


def integrity_faults(path: Path) -> list[str]:
    connection = sqlite3.connect(path)
    try:
        verdict = connection.execute("PRAGMA integrity_check").fetchone()[0]
    finally:
        connection.close()
    return [] if verdict == "ok" else [f"integrity_check: {verdict}"]


def record_forever(path: Path, begin: int, answer: Connection) -> None:
    with Store.open_user(path) as store:
        while True:
            store.record(KEYS[0], {"block": begin}, result_of(begin + 1.0), {})
            answer.send(begin)
            begin += 1


def kills(path: Path, count: int) -> dict[str, Any]:
    """Kill so many processes while they commit one result after another; what was reported must be there each time."""
    faults: list[str] = []
    begin = 0
    for number in range(count):
        ours, theirs = FORK.Pipe(duplex=False)
        process = FORK.Process(target=record_forever, args=(path, begin, theirs))
        process.start()
        theirs.close()
        last = ours.recv()
        time.sleep(random.uniform(0, MOST_DELAY_S))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        try:
            while True:
                last = ours.recv()
        except EOFError:
            ours.close()
        faults += [f"kill {number}: {fault}" for fault in integrity_faults(path)]
        with Store.open(path, read_only=True) as store:
            kept = sorted(trial.config["block"] for trial in store.trials(KEYS[0]))
        if kept not in (list(range(last + 1)), list(range(last + 2))):  # one may be committed and not yet reported
            faults.append(f"kill {number}: reported {counted(last + 1, 'result')}, kept {len(kept)}")
        begin = len(kept)
    return {"kills": count, "kept": begin, "faults": faults}


def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="stress_cache", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("writers", "kills"))
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--kills", type=int, default=200)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="dmuon-tune-stress-") as folder:
        path = Path(folder) / "cache.sqlite"
        if options.what == "writers":
            found = writers(path, options.processes, options.seconds)
        else:
            found = kills(path, options.kills)
    print(json.dumps(found, indent=2))
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(run("stress_cache", main))
