"""Assignments: every matrix has one owner, loads are what the costs say, bounds hold, memory limits are kept."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon_tune.errors import UsageError
from dmuon_tune.runtime.ownership import Assignment, Costs, Work, assign, highs, solve
from dmuon_tune.runtime.ownership.costs import Point
from dmuon_tune.runtime.ownership.even import evenly, is_even
from dmuon_tune.runtime.ownership.instance import Instance

UNHURRIED = settings(deadline=None, max_examples=40)
TOOLS = Path(__file__).resolve().parents[3] / "tools"


@pytest.fixture
def random_instance(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[Work]]:
    """Those of ``tools/bench_ownership.py``."""
    monkeypatch.syspath_prepend(str(TOOLS))
    from bench_ownership import instance

    return instance  # type: ignore[no-any-return]


def costs(*points: tuple[int, float]) -> Costs:
    return Costs.of(Point(batch, us) for batch, us in points)


def loads_of(work: Sequence[Work], found: Assignment, owners: int) -> list[float]:
    """Each owner's time, from nothing but who owns what."""
    batches = Counter((owner, item.rows, item.cols, item.costs) for owner, item in zip(found.owner, work, strict=True))
    loads = [0.0] * owners
    for (owner, _, _, priced), batch in batches.items():
        loads[owner] += priced.us(batch)
    return loads


@st.composite
def models(draw: st.DrawFn, most: int = 12) -> list[Work]:
    """Some layers, up to ``most``, of some shapes, each with costs of its own."""
    work = []
    for rows in range(1, draw(st.integers(1, 4)) + 1):
        alone = draw(st.floats(1.0, 500.0))
        batched = draw(st.floats(0.3, 1.0))
        priced = costs((1, alone), (2, 2 * alone * batched), (8, 8 * alone * batched**2))
        state = draw(st.integers(1, 50))
        work += [Work(rows, 64, layer, priced, state) for layer in range(draw(st.integers(1, most)))]
    return work


@UNHURRIED
@given(models(), st.integers(1, 9))
def test_every_matrix_has_one_owner_and_loads_are_the_costs(work: list[Work], owners: int) -> None:
    found = assign(work, owners, seconds=0.05)
    assert len(found.owner) == len(work) and set(found.owner) <= set(range(owners))
    assert found.loads_us == pytest.approx(loads_of(work, found, owners))
    assert found.makespan_us == max(found.loads_us)
    assert found.bound_us <= found.makespan_us * (1 + 1e-9)
    assert found.makespan_us <= assign(work, owners, seconds=0.0).makespan_us * (1 + 1e-9)


@UNHURRIED
@given(models(most=2), st.integers(2, 3))
def test_the_bound_is_one_and_the_best_is_found(work: list[Work], owners: int) -> None:
    every = (Assignment(owner, (), 0.0, "") for owner in product(range(owners), repeat=len(work)))
    best = min(max(loads_of(work, each, owners)) for each in every)
    found = assign(work, owners, seconds=5.0)
    assert found.bound_us <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= found.makespan_us <= best * 1.05


@UNHURRIED
@given(models(), st.integers(2, 6), st.floats(1.05, 3.0))
def test_memory_is_kept_or_refused(work: list[Work], owners: int, slack: float) -> None:
    limit = int(sum(item.state_bytes for item in work) / owners * slack)
    try:
        found = assign(work, owners, seconds=0.05, memory_bytes=limit)
    except UsageError as error:
        assert "raise" in str(error)
        return
    held = Counter[int]()
    for owner, item in zip(found.owner, work, strict=True):
        held[owner] += item.state_bytes
    assert max(held.values()) <= limit


def test_batches_count() -> None:
    # Two of the small shape cost one owner as much as one: they go together, and no owner takes three things.
    large, small = costs((1, 10.0)), costs((1, 10.0), (2, 10.0))
    found = assign([Work(8, 8, 0, large, 1), Work(2, 2, 0, small, 1), Work(2, 2, 1, small, 1)], 2)
    assert found.owner[1] == found.owner[2] != found.owner[0]
    assert (found.makespan_us, found.bound_us, found.gap) == (10.0, 10.0, 0.0)


@pytest.mark.parametrize(("over", "even"), [(0.5, True), (1.5, False)])
def test_an_even_split_is_preferred_where_it_costs_at_most_one_percent(over: float, even: bool) -> None:
    # Eight small matrices take as long together as two large ones, four a little longer than one.
    large, small = costs((1, 10.0)), costs((1, 2.0), (4, 10.0 + over), (8, 20.0))
    work = [Work(8, 8, layer, large, 1) for layer in range(18)] + [Work(2, 2, layer, small, 1) for layer in range(8)]
    found = assign(work, 2, seconds=20.0)
    assert found == assign(work, 2, seconds=20.0) and (found.method == "even split") is even
    assert found.makespan_us == (100.0 + over if even else 100.0)
    held = Counter((owner, item.rows) for owner, item in zip(found.owner, work, strict=True))
    assert sorted(held.values()) == ([4, 4, 9, 9] if even else [8, 8, 10])


def test_what_an_even_split_leaves_over_goes_where_it_is_done_first() -> None:
    # Of a class with fewer matrices than owners one takes both, for they run together.
    of = {8: costs((1, 30.0)), 4: costs((1, 20.0)), 2: costs((1, 10.0), (2, 10.5))}
    work = [Work(rows, rows, layer, of[rows], 5) for rows, count in ((8, 4), (4, 4), (2, 2)) for layer in range(count)]
    counts = evenly(Instance.of(work, 3, None), math.inf)
    assert counts is not None and sorted(map(tuple, counts.T.tolist())) == [(1, 1, 2), (1, 2, 0), (2, 1, 0)]
    limited = evenly(Instance.of(work, 3, 20), math.inf)  # of four matrices: the last two cannot go together
    assert limited is not None and limited.sum(axis=0).max() <= 4 and is_even(Instance.of(work, 3, 20), limited)


@pytest.mark.parametrize("number", [4, 5, 15, 17])
def test_random_instances_are_near_their_bound(number: int, random_instance: Callable[[int], list[Work]]) -> None:
    # With the time that all passes take; what two seconds reach is in docs/ownership.md.
    work, owners = random_instance(number), {4: 48, 5: 64, 15: 64, 17: 128}[number]
    first, found = (assign(work, owners, seconds=seconds) for seconds in (0.0, 20.0))
    assert found.gap <= 0.03 and found.makespan_us < first.makespan_us
    assert found.method == "column generation" and first.method == "longest first"
    assert found.loads_us == pytest.approx(loads_of(work, found, owners))


def test_the_same_seed_gives_the_same_owners() -> None:
    work = [
        Work(rows, 4, layer, costs((1, 10.0 + 7 * rows), (2, 12.0 + 11 * rows), (6, 15.0 + 36 * rows)), 1)
        for layer in range(7) for rows in range(1, 6)
    ]
    first, second, other = (assign(work, 9, seconds=20.0, seed=seed) for seed in (3, 3, 4))
    assert first == second
    assert other.makespan_us <= assign(work, 9, seconds=0.0).makespan_us


def test_without_highs_the_local_search_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    work = [Work(rows, 4, layer, costs((1, 10.0 + 7 * rows)), 1) for layer in range(5) for rows in range(1, 6)]
    monkeypatch.setattr(solve, "has_highs", lambda: False)
    found = assign(work, 4, seconds=5.0)
    assert found.method == "local search"
    assert found.makespan_us <= assign(work, 4, seconds=0.0).makespan_us


def test_a_solver_that_fails_leaves_what_there_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, random_instance: Callable[[int], list[Work]]
) -> None:
    solved = highs.Master.solve

    def twice(master: highs.Master) -> highs.Relaxed:
        calls.append(1)
        if len(calls) > 2:
            master._model.setOptionValue("simplex_iteration_limit", 0)
        return solved(master)

    calls: list[int] = []
    monkeypatch.setattr(highs.Master, "solve", twice)
    work = random_instance(5)
    found = assign(work, 64, seconds=20.0)
    assert found.makespan_us <= assign(work, 64, seconds=0.0).makespan_us
    assert found.loads_us == pytest.approx(loads_of(work, found, 64)) and "HiGHS ended with" in caplog.text


def test_no_output_of_the_solver(
    capfd: pytest.CaptureFixture[str], random_instance: Callable[[int], list[Work]]
) -> None:
    assert assign(random_instance(5), 64, seconds=20.0).method == "column generation"
    assert capfd.readouterr() == ("", "")


def test_a_layer_is_spread_over_owners_and_nodes() -> None:
    # Eight owners of four nodes; every layer has four matrices of two shapes: no two on one owner, one on each node.
    of = {64: costs((1, 10.0)), 32: costs((1, 5.0))}
    work = [Work(rows, 64, layer, of[rows], 1) for layer in range(8) for rows in (64, 64, 32, 32)]
    found = assign(work, 8, nodes=4)
    assert found.makespan_us == pytest.approx(found.bound_us) == 30.0
    for layer in range(8):
        owners = {owner for owner, item in zip(found.owner, work, strict=True) if item.layer == layer}
        assert len(owners) == 4 and len({owner // 2 for owner in owners}) == 4


@UNHURRIED
@given(models(), st.sampled_from([(4, 2), (6, 3), (8, 8)]))
def test_spreading_changes_no_load(work: list[Work], size: tuple[int, int]) -> None:
    owners, nodes = size
    together, apart = (assign(work, owners, nodes=each, seconds=0.0) for each in (1, nodes))
    assert sorted(together.loads_us) == pytest.approx(sorted(apart.loads_us))


def test_nothing_to_assign() -> None:
    assert assign([], 3) == Assignment((), (0.0, 0.0, 0.0), 0.0, "longest first")


def test_costs_between_and_beyond_points() -> None:
    known = costs((4, 16.0), (2, 10.0))
    assert [known.us(batch) for batch in (0, 1, 2, 3, 4, 8)] == [0.0, 10.0, 10.0, 13.0, 16.0, 32.0]
    assert [known.measured(batch) for batch in (1, 2, 3, 4, 5)] == [False, True, True, True, False]
    in_pieces = Costs(known.points, most=4)
    assert in_pieces.us(7) == 16.0 + 13.0 and in_pieces.measured(7)


def test_costs_never_fall() -> None:
    assert [costs((1, 5.0), (2, 4.0)).us(batch) for batch in (1, 2)] == [5.0, 5.0]
    with pytest.raises(UsageError, match="at least one"):
        costs()


@pytest.mark.parametrize(
    "wrong",
    [{"owners": 0}, {"owners": 2, "nodes": 0}, {"owners": 2, "seconds": -1.0}, {"owners": 3, "nodes": 2}],
)
def test_what_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        assign([Work(2, 2, 0, costs((1, 1.0)), 1)], **wrong)  # type: ignore[arg-type]


def test_what_owners_hold_does_not_depend_on_the_matrices_order() -> None:
    """A model's matrices by name, as tools read them, and as its modules are; several plans are equally good."""
    shapes = {"q": (6, 6), "k": (1, 6), "v": (1, 6), "o": (6, 6), "gate": (35, 6), "up": (35, 6), "down": (6, 35)}
    priced = {shape: costs((1, 20.0 + shape[0] * shape[1])) for shape in set(shapes.values())}

    def held(order: Sequence[str]) -> Counter[tuple[tuple[tuple[int, int], int], ...]]:
        work = [Work(*shapes[name], layer, priced[shapes[name]], 5) for layer in range(28) for name in order]
        found = assign(work, 8, seconds=20.0)
        by_owner = [Counter((item.rows, item.cols) for item, its in zip(work, found.owner, strict=True) if its == owner)
                    for owner in range(8)]
        return Counter(tuple(sorted(each.items())) for each in by_owner)

    assert held(list(shapes)) == held(sorted(shapes))
