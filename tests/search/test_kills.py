"""SIGKILL at many moments of tuning runs: the cache opens, no finished trial is lost, none is repeated."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

MOMENTS = 20
# One process imports everything; each life is a fork of it that tunes, measures within itself (a measuring process of
# its own would take seconds to start in each of the lives) and is killed shortly after some result was kept.
LIVES = """
import faulthandler, json, os, random, signal, sys, time
from pathlib import Path

from in_process import Within, prepare

from dmuon_tune.cache import Store
from dmuon_tune.measure import race, timing
from dmuon_tune.recipe import Group
from dmuon_tune.search import TuneOptions, run, tune
from dmuon_tune.search.progress import Silent

HANGS_S = 30  # without a result; then the life's stacks are on stderr
path, log, moments = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
GROUPS = [Group(2, 8, 16 + 8 * place) for place in range(10)]


class Log(Silent):
    def _say(self, *what):
        with open(log, "a") as file:
            file.write(json.dumps(what) + "\\n")
    def trying(self, problem, kernel, config): self._say("try", problem.label(), kernel, config)
    def measured(self, problem, kernel, config, *_): self._say("kept", problem.label(), kernel, config)
    def timed(self, recipe, *_): self._say("timed", recipe.group.label(), recipe.form, recipe.chunk)


def state():
    with Store.open(path) as store:
        trials = [[trial.key.problem.label(), trial.key.kernel, trial.config] for trial in store.all_trials()]
        chains = [[c.recipe.group.label(), c.recipe.form, c.recipe.chunk] for c in store.chain_trials()]
    return trials, chains


run.Executor = Within
race.LIMIT_S, timing.CPU_EXTRA_S = 0.05, 0.0  # for windows in place of those that a busy machine disturbs
prepare()
rng, killed, wrong = random.Random(7), 0, []
Store.open(path).close()
while killed < moments:
    before, chains_before = state()
    log.write_text("")
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        with Store.open(path) as store:
            tune(GROUPS, store, TuneOptions(device="cpu", backends=("library",)), Log())
        os._exit(0)
    deadline = time.monotonic() + 2 * HANGS_S
    while time.monotonic() < deadline and not any(s in log.read_text() for s in ("kept", "timed")):
        time.sleep(0.002)
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
    time.sleep(rng.uniform(0, 0.1))
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    if status != signal.SIGKILL:
        wrong.append(["hung", status])
        break
    killed += 1
    said = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("]")]
    after, chains_after = state()
    wrong += [["lost", each] for each in before + [s[1:] for s in said if s[0] == "kept"] if each not in after]
    wrong += [["repeated", s] for s in said if s[0] == "try" and s[1:] in before]
    timed = [s[1:] for s in said if s[0] == "timed"]
    wrong += [["lost chain", each] for each in chains_before + timed if each not in chains_after]
print(json.dumps({"killed": killed, "wrong": wrong, "trials": len(state()[0]), "chains": len(state()[1])}))
"""


def test_kills_at_any_moment_lose_and_repeat_nothing(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    folders = map(str, (Path(__file__).parents[2], Path(__file__).parent))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*folders, *sys.path])}
    command = [sys.executable, "-c", LIVES, str(path), str(tmp_path / "log"), str(MOMENTS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["killed"] == MOMENTS and found["wrong"] == [], done.stderr
    assert found["trials"] + found["chains"] >= MOMENTS
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
