"""Claims: taken whole or not at all, kept by heartbeats, and returned by the dead; the same over files and servers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from dmuon_tune.cache import Claims, Store
from dmuon_tune.cache.claims import ClaimRow, is_gone, this_process
from dmuon_tune.errors import UsageError

OTHER_HOST = "another machine"


@pytest.fixture(params=["file", "postgresql"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where several runs find one store."""
    return str(tmp_path / "cache.sqlite") if request.param == "file" else request.getfixturevalue("new_database")()


@pytest.fixture
def store(shared: str) -> Iterator[Store]:
    with Store.open(shared) as opened:
        yield opened


def run_of(store: Store, host: str, pool: str = "H200") -> Claims:
    """A run on some machine, which this one cannot look into."""
    return Claims(store, pool, host=host, process="")


def expire(store: Store, claims: Claims) -> None:
    """As if its last heartbeat was long ago."""
    with store._writing() as session:
        session.execute(text("UPDATE dmuon_claims SET expires_s = expires_s - 1000 WHERE host = :host"),
                        {"host": claims._mine["host"]})


def test_a_unit_is_one_runs_until_it_is_released(store: Store) -> None:
    a, b = run_of(store, "a"), run_of(store, "b")
    assert a.take([["1", "2"], ["3"]]) == [True, True] and a.take([["2"]]) == [True]
    assert b.take([["2", "4"], ["5"]]) == [False, True]
    assert a.take([["4"]]) == [True], "of a set that was not taken nothing is kept"
    assert (b.rivals().runs, b.rivals().held) == (1, {"1": "a", "2": "a", "3": "a", "4": "a"})
    a.release(["1", "2", "5"])
    assert b.take([["1", "2"]]) == [True] and a.take([["5"]]) == [False]
    assert a.renew() == {"3", "4"} and b.renew() == {"1", "2", "5"}


def test_a_run_counts_from_its_first_request_until_it_leaves(store: Store) -> None:
    a, b = run_of(store, "a"), run_of(store, "b")
    assert a.take([["1"]]) == [True] and b.take([["1"]]) == [False]
    assert a.rivals().runs == 1 and b.rivals().runs == 1
    a.leave()
    assert b.rivals().runs == 0 and b.take([["1"]]) == [True]


def test_unlike_devices_do_not_count_as_rivals(store: Store) -> None:
    a, b = run_of(store, "a"), run_of(store, "b", pool="B200")
    assert a.take([["gram on H200"]]) == [True] and b.take([["gram on B200"]]) == [True]
    assert a.rivals() == b.rivals() and a.rivals().runs == 0 and not a.rivals().held


def test_what_is_not_renewed_returns_and_its_claimant_learns_of_it(store: Store) -> None:
    a, b = run_of(store, "a"), run_of(store, "b")
    a.take([["1"], ["2"]])
    assert b.take([["1"]]) == [False]
    expire(store, a)
    assert b.rivals().runs == 0 and b.take([["1"]]) == [True]
    assert a.renew() == set(), "the claims ended for good, also those that nobody took"
    assert b.rivals().runs == 1, "but the run is at work again"
    a.take([["2"]])
    expire(store, b)
    assert a.renew() == {"2"} and a.take([["1"]]) == [True]


def test_the_databases_clock_counts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 4e9)
    a, b = run_of(store, "a"), run_of(store, "b")
    a.take([["1"]])
    with store._reading() as session:
        expires_s = {row.expires_s for row in session.query(ClaimRow)}
    assert all(1.7e9 < each < 3.9e9 for each in expires_s)
    assert b.take([["1"]]) == [False]


def test_a_process_that_died_on_this_machine_holds_nothing(store: Store) -> None:
    code = "from dmuon_tune.cache.claims import this_process; print(this_process(), flush=True); input()"
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    a, b = Claims(store, "H200", process=name), run_of(store, "b")
    a.take([["1"]])
    assert not is_gone(name) and b.take([["1"]]) == [False] and b.rivals().runs == 1
    process.kill()
    while process.poll() is None and not is_gone(name):  # ended, though nobody waited for it yet
        pass
    assert is_gone(name) and b.rivals().runs == 0 and b.take([["1"]]) == [True]
    process.wait()


def test_only_a_process_in_sight_can_be_called_gone() -> None:
    mine = this_process()
    place, _, number = mine.rpartition(" ")[0].rpartition(" ")
    assert not is_gone(mine) and not is_gone("") and not is_gone(f"{OTHER_HOST} 1 1 0 {number} 1")
    assert is_gone(f"{place} {number} 1"), "another process had this number before"


def test_of_many_at_once_one_gets_it(shared: str) -> None:
    won: list[tuple[int, bool]] = []
    begin = threading.Barrier(4)

    def compete(number: int) -> None:
        with Store.open(shared) as store:
            claims = run_of(store, f"{number}")
            begin.wait(30)
            for unit in range(12):
                won.append((unit, claims.take([[f"{unit} a", f"{unit} b"]])[0]))

    Store.open(shared).close()
    threads = [threading.Thread(target=compete, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 48 and sorted(unit for unit, is_mine in won if is_mine) == list(range(12))


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan"])
def test_a_bad_lease_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("DMUON_TUNE_CLAIM_S", value)
    with Store.open("sqlite://") as store, pytest.raises(UsageError, match="DMUON_TUNE_CLAIM_S must be seconds"):
        Claims(store, "H200")
