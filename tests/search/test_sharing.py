"""Several runs over one cache: nothing is tuned twice, nothing is lost, and the work of the dead returns."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import Store
from dmuon_tune.search.claims import Membership, Share

ROOT = Path(__file__).parents[2]
# One process imports everything and forks a run for each host, which measures within itself.
TUNE = """
import json, os, socket, sys
from in_process import Within, prepare
from dmuon_tune.cache import Store, claims
from dmuon_tune.recipe import Group
from dmuon_tune.search import TuneOptions, run, tune
from dmuon_tune.search.progress import PlainLines

class Events(PlainLines):
    def measured(self, problem, kernel, config, *rest):
        print(json.dumps(["product", str(problem), kernel, config]), flush=True)

    def timed(self, recipe, *rest):
        print(json.dumps(["chain", str(recipe)]), flush=True)

def tune_on(host):
    if host:  # as on another machine: its processes are out of sight
        socket.gethostname, claims.this_process = lambda: host, lambda: ""
    groups = [Group(1, rows, 3 * rows) for rows in (8, 16)]
    print(os.getpid(), flush=True)
    input()
    with Store.open(place) as store:
        report = tune(groups, store, TuneOptions(device="cpu", backends=("library",)), Events(sys.stderr))
    print(json.dumps(["end", report.measured, report.reused, report.complete, report.chains.timed,
                      report.chains.reused, [problem.winner.key.kernel for problem in report.problems],
                      [each.form for each in report.recipes]]))

def close():
    for _, *streams in runs:
        for descriptor in streams:
            os.close(descriptor)

place, runs = sys.argv[1], json.loads(sys.argv[2])  # host, stdin, stdout, stderr
run.Executor = Within
prepare()
for host, *streams in runs:
    if os.fork() == 0:
        for stream, descriptor in enumerate(streams):
            os.dup2(descriptor, stream)
        close()
        tune_on(host)
        sys.exit()
close()
for _ in runs:
    os.wait()  # at once, so that a killed one is seen to be dead
"""


class Process:
    """A tuning process: ``host`` is its machine (empty: this one), ``theirs`` its stdin, stdout and stderr."""

    def __init__(self, host: str, errors: Path) -> None:
        self.said: list[list[Any]] = []
        self._host, self._errors = host, errors
        stdin, to = os.pipe()
        of, stdout = os.pipe()
        self.theirs = [stdin, stdout, os.open(errors, os.O_CREAT | os.O_WRONLY)]
        self._input, self._lines = os.fdopen(to, "w"), os.fdopen(of)

    @property
    def arguments(self) -> list[Any]:
        return [self._host, *self.theirs]

    def begun(self) -> None:
        """The process has its streams."""
        for descriptor in self.theirs:
            os.close(descriptor)
        self._pid = int(self._lines.readline())

    def go(self) -> None:
        self._input.write("\n")
        self._input.flush()

    def read(self, count: int) -> None:
        """Wait for so many events more."""
        self.said += [json.loads(self._lines.readline()) for _ in range(count)]

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        self._finish()

    def end(self) -> list[Any]:
        """What it reports at its end."""
        self._finish()
        assert self.said and self.said[-1][0] == "end", self.progress
        return self.said.pop()[1:]

    def _finish(self) -> None:
        self.said += [json.loads(line) for line in self._lines if line.endswith("]\n")]
        self._lines.close()
        self._input.close()

    @property
    def progress(self) -> str:
        return self._errors.read_text()

    @property
    def done(self) -> list[str]:
        return [json.dumps(event) for event in self.said]


@pytest.fixture
def processes(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Process]]:
    """Three processes that tune into ``place`` once told to: on one machine, into a server the first on another one."""
    folders = map(str, (ROOT, Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*folders, *sys.path]))
    if "://" in place:
        monkeypatch.setenv("DMUON_TUNE_CLAIM_S", "8")  # on one machine a death is seen at once
    hosts = ("node-a" if "://" in place else "", "", "")
    runs = [Process(host, tmp_path / f"errors-{number}") for number, host in enumerate(hosts)]
    arguments = json.dumps([run.arguments for run in runs])
    descriptors = [descriptor for run in runs for descriptor in run.theirs]
    command = [sys.executable, "-c", TUNE, place, arguments]
    with subprocess.Popen(command, pass_fds=descriptors, start_new_session=True) as parent:
        try:
            for run in runs:
                run.begun()
            yield runs
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)  # what a failed test leaves


@pytest.fixture(params=["file", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "cache.sqlite") if request.param == "file" else request.getfixturevalue("new_database")()


def kept(place: str) -> tuple[int, int]:
    """How many products' and chains' results there are; no claim is left."""
    with Store.open(place) as store:
        assert Membership(store, fingerprint("cpu")).rivals().held == {}
        return len(store.all_trials()), len(store.chain_trials())


def test_runs_divide_the_work_and_finish_what_a_killed_one_began(place: str, processes: list[Process]) -> None:
    doomed, *others = processes
    doomed.go()
    doomed.read(2)
    for run in others:
        run.go()
    doomed.read(1)
    doomed.kill()
    a, b = (run.end() for run in others)
    events = [event for run in (doomed, *others) for event in run.done]
    assert len(events) == len(set(events)), "nothing is measured twice"
    products, chains = kept(place)
    theirs = sum(event[0] == "product" for event in doomed.said)
    assert products - a[0] - b[0] in (theirs, theirs + 1), "what the killed one measured is kept, said or not"
    assert a[0] + a[1] == b[0] + b[1] == products and a[2] is b[2] is True
    assert chains - a[3] - b[3] <= len(doomed.said) - theirs + 1
    for end in (a, b):
        assert len(end[5]) == 6 and len(end[6]) == 2, "both end with all winners and recipes"
    assert "waiting for" in "".join(run.progress for run in others) or "://" not in place


@pytest.fixture
def members(place: str) -> Iterator[Callable[[], Membership]]:
    stores, found = [], []

    def join() -> Membership:
        stores.append(Store.open(place))
        found.append(Membership(stores[-1], fingerprint("cpu")))
        return found[-1]

    yield join
    for membership in found:
        membership.close()
    for store in stores:
        store.close()


UNITS = {name: [name, f"{name}'"] for name in "abcdefg"}


def look(membership: Membership) -> Membership:
    membership._next_look = 0.0  # as if a moment had passed
    return membership


def test_whoever_comes_later_gets_an_even_part(members: Callable[[], Membership]) -> None:
    first, second = members(), members()
    one, two = Share(first, UNITS), Share(second, UNITS)
    mine = one.take()
    assert mine == list("abcdefg") and one.open == [] and one.surplus(mine, []) == []
    assert two.take() == [] and len(two.open) == 7 and two.holders()
    look(first)
    extra = one.surplus(mine, ["g"])
    assert extra == ["f", "e", "d"], "the least urgent, but for what is under way"
    one.give_back(extra)
    look(second)
    assert sorted(two.take()) == ["d", "e", "f"] and two.open == list("abcg")
    assert one.surplus(list("abcg"), []) == [] and one.open == ["f", "e", "d"]

    two.finish(["e", "f"])  # it is done with two of three; the first is still with four
    look(first)
    assert one.take() == ["f", "e"] and one.open == ["d"], "what others finished, to look at their results"
    one.finish(["f", "e", "a", "b", "c", "g"])
    second.close()
    look(first)
    assert one.take() == ["d"] and one.open == []


def test_what_expired_under_a_sleeping_run_is_given_up(
    members: Callable[[], Membership], monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper, other = members(), members()
    monkeypatch.setattr(sleeper, "_beat", lambda claims: None)  # a machine whose lid is closed
    one, two = Share(sleeper, UNITS), Share(other, UNITS)
    mine = one.take()
    with sleeper._claims._store._writing() as session:  # type: ignore[union-attr]
        session.execute(text("UPDATE dmuon_claims SET expires_s = 0"))
    assert two.take() == mine
    with sleeper._lock:
        sleeper._held &= sleeper._claims.renew()  # type: ignore[union-attr]
    assert one.surplus(mine, ["a"]) == list("bcdefg"), "all but what is under way"


def test_alone_in_memory_nothing_is_claimed() -> None:
    with Store.open("sqlite://") as store:
        membership = Membership(store, fingerprint("cpu"))
        share = Share(membership, UNITS)
        assert membership.is_alone and share.take() == list("abcdefg") and share.surplus(list("abc"), []) == []
        share.finish(list("abc"))
        membership.close()
