"""The search of a group's recipe, on made-up times: which chains it asks for, in which order, and what it keeps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dmuon_tune import chains
from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import CacheEntry, Store
from dmuon_tune.device import DeviceFingerprint
from dmuon_tune.kernel_specs import kernel
from dmuon_tune.measure.build import tuning_key
from dmuon_tune.measure.chain import chain_key
from dmuon_tune.measurement import Measurement
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, Recipe, chain, first_launch, written
from dmuon_tune.search.recipes import (
    FORMS,
    OWN,
    PIECES,
    ChainSearch,
    Tuned,
    chunks,
    close,
    estimates,
    is_current,
    keep_recipe,
    priced,
)
from dmuon_tune.search.start import as_untuned

SQUARE = Group(1, 64, 64)
BATCH = Group(6, 64, 64)
SPECS = [kernel(f"{op}.{backend}") for op in ("gram", "gemm_symmetric", "apply") for backend in ("library", "tilelang")]
CPU = fingerprint("cpu")
SMALL_L2 = replace(CPU, l2_bytes=4 * 64 * 64 * 4 * 2 * 2)  # the Gram form's squares of two matrices fill half of it


def ok(median_us: float) -> Measurement:
    return Measurement.from_samples([median_us], 0.0, {})


def entry(problem: Problem, kernel_name: str, median_us: float = 1.0) -> CacheEntry:
    spec = kernel(kernel_name)
    config = vars(spec.untuned(problem, CPU))
    return CacheEntry(tuning_key(spec, problem, CPU), dict(config), ok(median_us), "", {})


def tuned(
    group: Group, *forms: str, ties: tuple[str, ...] = (), own: tuple[str, ...] = ()
) -> dict[Problem, Tuned]:
    problems = [problem for form in forms for problem in chain(group, form, "float32")]
    return {
        problem: Tuned(
            entry(problem, f"{problem.op}.library"),
            (entry(problem, f"{problem.op}.tilelang"),) if problem.op in ties else (),
            entry(problem, f"{problem.op}.tilelang") if problem.op in own else None,
        )
        for problem in problems
    }


def walk(search: ChainSearch, measure: Callable[[Recipe], Measurement]) -> list[Recipe]:
    """Every chain that the search asks for."""
    asked = []
    while (recipe := search.candidate) is not None:
        asked.append(recipe)
        search.observe(measure(recipe))
    return asked


def search_of(group: Group, forms: tuple[str, ...], known: dict[Problem, Tuned]) -> ChainSearch:
    prices = priced([group])[group]
    return ChainSearch(estimates(group, forms, "float32", known), known, SPECS, SMALL_L2, prices=prices)


def kernels_of(recipe: Recipe) -> dict[str, str]:
    return {pick.problem.op: pick.kernel.partition(".")[2] for pick in recipe.picks}


def test_the_cheaper_sum_is_first_and_a_missing_winner_leaves_a_form_out() -> None:
    forms = ("gram", "plain")
    known = tuned(SQUARE, *forms)
    found = estimates(SQUARE, forms, "float32", known)
    counts = {form: sum(chain(SQUARE, form, "float32").values()) for form in forms}
    assert [(recipe.form, recipe.cost_us) for recipe in found] == sorted(counts.items(), key=lambda item: item[1])
    assert not any(recipe.timed for recipe in found)
    only_plain = next(p for p in known if p.op == "apply" and p.epilogue == "c")
    del known[only_plain]
    assert [recipe.form for recipe in estimates(SQUARE, forms, "float32", known)] == ["gram"]
    assert estimates(SQUARE, forms, "float32", {}) == []


def test_batches_are_halved_until_the_squares_stay_in_the_l2() -> None:
    per_matrix = chains.SQUARES["gram"] * 1024**2 * 2
    group = Group(16, 1024, 4096)
    assert chunks(group, "gram", "float16", 2 * 16 * per_matrix) == []
    assert chunks(group, "gram", "float16", 2 * 3 * per_matrix) == [8, 4, 2]
    assert chunks(group, "gram", "float16", 1) == [8, 4, 2, 1]
    assert chunks(Group(7, 1024, 4096), "plain", "float16", 1) == [4, 2, 1]
    assert chunks(Group(4, 33, 35), "gram", "float16", 1) == []  # 2310 bytes: the next matrix is not aligned
    assert chunks(group, "small", "float16", 1) == chunks(Group(1, 8, 8), "gram", "float16", 1) == []


def test_form_then_smaller_batches_then_tied_kernels_then_pieces() -> None:
    def measure(recipe: Recipe) -> Measurement:
        time_us = {"gram": 10.0, "plain": 12.0}[recipe.form] * recipe.group.batch
        time_us *= {None: 1.0, 3: 0.9, 2: 0.7}[recipe.chunk]
        return ok(time_us * (0.8 if kernels_of(recipe)["apply"] == "tilelang" else 1.0))

    search = search_of(BATCH, ("gram", "plain"), tuned(BATCH, "gram", "plain", ties=("gram", "apply")))
    asked = walk(search, measure)
    assert {(recipe.form, recipe.chunk) for recipe in asked[:2]} == {("gram", None), ("plain", None)}
    assert [(recipe.group.batch, recipe.form, recipe.chunk) for recipe in asked[2:5]] == [
        (1, "gram", None), (2, "gram", None), (4, "gram", None)
    ]
    assert [kernels_of(recipe) for recipe in asked[5:7]] == [
        {"gram": "tilelang", "gemm_symmetric": "library", "apply": "library"},
        {"gram": "library", "gemm_symmetric": "library", "apply": "tilelang"},
    ]
    assert [(recipe.group, recipe.chunk) for recipe in asked[5:]] == [(BATCH, chunk) for chunk in (None, None, 3, 2)]
    best = search.recipe()
    assert search.stage == PIECES and best.timed and (best.form, best.chunk, best.pieces) == ("gram", 2, (2, 2, 2))
    assert kernels_of(best) == {"gram": "library", "gemm_symmetric": "library", "apply": "tilelang"}
    assert best.cost_us == ok(60.0 * 0.7 * 0.8).median_us
    assert best.batch_costs == ((1, 10.0), (2, 20.0), (4, 40.0))
    assert is_current(best, SPECS, SMALL_L2)
    stale = replace(best, picks=(replace(best.picks[0], key="older code"), *best.picks[1:]))
    assert not is_current(stale, SPECS, SMALL_L2) and not is_current(replace(best, p20_us=None), SPECS, SMALL_L2)


@pytest.mark.parametrize(
    ("faster", "order"),
    [
        ({"gram": 0.5, "gemm_symmetric": 0.9, "apply": 1.2}, ["gram gemm_symmetric apply"]),
        ({"gram": 0.9, "gemm_symmetric": 2.0, "apply": 1.0},
         ["gram gemm_symmetric apply", "gemm_symmetric", "gram", "gram apply"]),
    ],
)
def test_own_kernels_that_the_library_beat_by_little_come_before_pieces(
    faster: dict[str, float], order: list[str]
) -> None:
    def measure(recipe: Recipe) -> Measurement:
        return ok(100.0 * math.prod(faster[op] for op, kernel in kernels_of(recipe).items() if kernel == "tilelang"))

    every = ("gram", "gemm_symmetric", "apply")
    search = search_of(BATCH, ("gram",), tuned(BATCH, "gram", ties=every, own=every))
    asked = [recipe for recipe in walk(search, measure) if recipe.group == BATCH]
    found = [" ".join(op for op in every if kernels_of(recipe)[op] == "tilelang") for recipe in asked]
    tried = ["", *order]  # the products that the chain spends most in first
    assert found[: len(tried)] == tried and [recipe.chunk for recipe in asked[len(tried) :]] == [3, 2]
    best = min(map(lambda recipe: measure(recipe).median_us or 0.0, asked))
    assert search.recipe().cost_us == best and search.stage == PIECES


def test_the_groups_that_promise_most_go_first() -> None:
    small, large = (search_of(Group(batch, 64, 64), ("gram",), tuned(Group(batch, 64, 64), "gram", own=("gram",)))
                    for batch in (1, 2))
    assert small.stage == large.stage == FORMS
    large.observe(ok(50.0))
    assert small.urgency < large.urgency and large.stage == OWN
    small.observe(ok(10.0))
    assert large.urgency < small.urgency, "the longer chain of two at one stage"


def test_what_was_timed_and_is_faster_is_never_given_up(tmp_path: Path) -> None:
    pair = Group(2, 64, 64)
    known = tuned(pair, "gram", own=("gram",))
    with Store.open(tmp_path / "cache.sqlite") as store:

        def keep(first_us: float, own_us: float) -> Recipe:
            search = search_of(pair, ("gram",), known)
            walk(search, lambda recipe: ok(own_us if kernels_of(recipe)["gram"] == "tilelang" else first_us))
            return keep_recipe(search, SPECS, SMALL_L2, store)

        fast = keep(98.0, 91.0)
        assert kernels_of(fast)["gram"] == "tilelang" and fast.batch_costs == ((1, 91.0),)
        store.record_chain(chain_key(fast, SMALL_L2), ok(91.0), {})
        assert keep(96.0, 97.0) == fast == store.recipe(SMALL_L2, pair, "float32")
        store.put_recipe(SMALL_L2, replace(fast, batch_costs=()))
        assert keep(96.0, 97.0) == replace(fast, batch_costs=((1, 96.0),))
        unpriced = ChainSearch(estimates(pair, ("gram",), "float32", known), known, SPECS, SMALL_L2)
        walk(unpriced, lambda recipe: ok(80.0))
        faster = keep_recipe(unpriced, SPECS, SMALL_L2, store)
        assert (faster.cost_us, faster.batch_costs) == (80.0, ((1, 96.0),)), "the budget ended before its own cost"


def test_of_a_shapes_groups_the_largest_prices_what_is_no_group_itself() -> None:
    groups = [Group(batch, 64, 96) for batch in (18, 19, 4)] + [Group(3, 96, 64), Group(1, 8, 8)]
    assert priced(groups) == {
        Group(19, 64, 96): (1, 2, 8, 16), Group(3, 96, 64): (1, 2), Group(1, 8, 8): (),
    }


def test_a_price_is_of_the_fastest_form_with_the_kernels_that_its_chain_runs() -> None:
    search = search_of(BATCH, ("gram",), tuned(BATCH, "gram", own=("apply",)))
    asked = walk(search, lambda recipe: ok(5.0 if kernels_of(recipe)["apply"] == "tilelang" else 9.0))
    prices = [recipe for recipe in asked if recipe.group != BATCH]
    assert [kernels_of(recipe)["apply"] for recipe in prices] == ["tilelang"] * 3
    assert [recipe.picks[0].problem.batch for recipe in prices] == [1, 2, 4]


def test_every_product_of_every_piece_has_its_kernel_under_todays_key() -> None:
    group = replace(BATCH, batch=5)
    search = search_of(group, ("gram",), tuned(group, "gram"))
    for recipe in walk(search, lambda recipe: ok(1.0)):
        assert {pick.problem for pick in recipe.picks} == recipe.products().keys()
        for pick in recipe.picks:
            assert pick.key == tuning_key(kernel(pick.kernel), pick.problem, SMALL_L2).sha256
    assert {size for recipe in [replace(search.recipe(), chunk=2)] for size in recipe.pieces} == {1, 2}


def test_another_batch_runs_its_own_winner_or_an_illegal_configuration_untuned() -> None:
    known = tuned(BATCH, "gram", ties=("gram", "gemm_symmetric", "apply"))
    known = {problem: Tuned(found.rivals[0]) for problem, found in known.items()}  # TileLang wins
    (gram,) = [problem for problem in chain(replace(BATCH, batch=1), "gram", "float32") if problem.op == "gram"]
    known[gram] = Tuned(entry(gram, "gram.library"))
    asked = walk(search_of(BATCH, ("gram",), known), lambda recipe: ok(1.0))
    alone = next(recipe for recipe in asked if recipe.group.batch == 1)
    assert kernels_of(alone) == {"gram": "library", "gemm_symmetric": "tilelang", "apply": "tilelang"}
    apply = next(problem for problem in known if problem.op == "apply")
    known[apply] = Tuned(replace(known[apply].winner, config={**known[apply].winner.config, "tile_m": 7}))
    for recipe in walk(search_of(BATCH, ("gram",), known), lambda recipe: ok(1.0)):
        pick = next(pick for pick in recipe.picks if pick.problem.op == "apply")
        assert pick.config == vars(kernel("apply.tilelang").untuned(pick.problem, CPU))


def test_a_form_that_fails_is_left_and_what_is_not_faster_is_not_taken() -> None:
    known = tuned(SQUARE, "gram", "plain", ties=("gram",))
    search = search_of(SQUARE, ("gram", "plain"), known)
    asked = walk(search, lambda recipe: Measurement("wrong_result") if recipe.form == "plain" else ok(5.0))
    assert [recipe.form for recipe in asked] == ["plain", "gram", "gram"]
    assert kernels_of(search.recipe())["gram"] == "library"  # no faster than the winner

    search = search_of(SQUARE, ("gram", "plain"), known)
    walk(search, lambda recipe: Measurement("crashed"))
    assert not search.recipe().timed and search.recipe().form == "plain"
    assert search.best_us is None and search.recipe().cost_us is not None


def test_rivals_replace_the_winner_one_after_another() -> None:
    known = tuned(SQUARE, "gram")
    apply = next(problem for problem in known if problem.op == "apply")
    base = entry(apply, "apply.tilelang")
    legal = kernel("apply.tilelang").legal_space(apply, CPU)[:3]
    known[apply] = Tuned(known[apply].winner, tuple(replace(base, config=dict(vars(config))) for config in legal))
    times = iter([10.0, 9.0, 9.5, 8.0][: 1 + len(legal)])
    search = search_of(SQUARE, ("gram",), known)
    asked = walk(search, lambda recipe: ok(next(times)))
    tried = [next(pick.config for pick in recipe.picks if pick.problem == apply) for recipe in asked]
    assert tried[1:] == [vars(config) for config in legal] and len(legal) > 1
    fastest = {2: 1, 3: 3}[len(legal)]
    assert next(pick.config for pick in search.recipe().picks if pick.problem == apply) == tried[fastest]


def test_what_stays_in_the_l2_may_change_places_more_easily() -> None:
    gpu = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 62914560, 150_000_000_000)
    small, large = Problem("gram", 1, 1024, 1024, 1024), Problem("gram", 16, 1024, 1024, 4096)
    assert 1.0 < close(large, gpu) < close(small, gpu) < 1.5


def test_a_form_far_behind_on_paper_is_not_timed() -> None:
    known = tuned(SQUARE, "gram", "plain")
    dear = next(problem for problem in known if problem.op == "apply" and problem.epilogue == "c")
    known[dear] = Tuned(entry(dear, "apply.library", 100.0))
    asked = walk(search_of(SQUARE, ("gram", "plain"), known), lambda recipe: ok(5.0))
    assert [recipe.form for recipe in asked] == ["gram"]
    asked = walk(search_of(SQUARE, ("gram", "plain"), known), lambda recipe: Measurement("timeout"))
    assert [recipe.form for recipe in asked] == ["gram", "plain"]  # unless nothing else works


H200 = DeviceFingerprint("NVIDIA H200", "sm_90", 132, 232448, 62914560, 150_000_000_000)


def on_gpu(problem: Problem, kernel_name: str, median_us: float = 1.0, **config: object) -> Tuned:
    spec = kernel(kernel_name)
    values = {**vars(spec.untuned(problem, H200)), **config}
    return Tuned(CacheEntry(tuning_key(spec, problem, H200), values, ok(median_us), "", {}))


def test_on_a_gpu_chains_begin_with_gradients_and_end_in_bf16() -> None:
    group, specs = Group(6, 1024, 4096), [*map(kernel, ("momentum.triton", "apply.triton"))]
    specs += [kernel(f"{op}.library") for op in ("gram", "gemm_symmetric", "apply")]
    products = list(chain(group, "gram", "float16"))
    known = {problem: on_gpu(problem, f"{problem.op}.library") for problem in products}
    last, first = products[-1], first_launch(group, "float16")
    known[last] = on_gpu(last, "apply.triton", 1.0)
    bare = estimates(group, ("gram",), "float16", known)[0].cost_us or 0.0

    def ends_of(found: dict[Problem, Tuned]) -> dict[int, list[tuple[str, str, int, str]]]:
        """(op, kernel, its batch, result) of the ends of the chains asked for, by the group's batch."""
        search = ChainSearch(estimates(group, ("gram",), "float16", found), found, specs, H200, prices=(1, 2, 4))
        return {
            recipe.group.batch: [
                (pick.problem.op, pick.kernel, pick.problem.batch, pick.problem.out_dtype)
                for pick in recipe.picks
                if pick.problem not in recipe.products()
            ]
            for recipe in walk(search, lambda recipe: ok(100.0 if recipe.chunk is None else 50.0 + recipe.chunk))
        }

    untuned = ends_of(known)
    assert untuned[2] == [("momentum", "momentum.triton", 2, "float16"), ("apply", "apply.triton", 2, "bfloat16")]
    assert untuned[6][0] == ("momentum", "momentum.triton", 6, "float16")
    known[first] = on_gpu(first, "momentum.triton", 7.0)
    known[written(last)] = on_gpu(written(last), "apply.triton", 3.0)
    assert estimates(group, ("gram",), "float16", known)[0].cost_us == bare + 7.0 + 3.0 - 1.0
    assert ends_of(known) == untuned
    known[last] = on_gpu(last, "apply.library")  # which writes no bf16: its own winner does
    assert ends_of(known) == untuned
    del known[written(last)]
    assert all([op for op, *_ in found] == ["momentum"] for found in ends_of(known).values())


def test_a_recipe_timed_without_its_ends_is_not_current_where_they_run() -> None:
    group, specs = Group(2, 1024, 4096), [kernel(f"{op}.library") for op in ("gram", "gemm_symmetric", "apply")]
    known = {problem: on_gpu(problem, f"{problem.op}.library") for problem in chain(group, "gram", "float16")}
    search = ChainSearch(estimates(group, ("gram",), "float16", known), known, specs, H200)
    walk(search, lambda recipe: ok(5.0))
    without = search.recipe()
    assert is_current(without, specs, H200) and not is_current(without, [*specs, kernel("momentum.triton")], H200)


def start_of(group: Group, form: str, chunk: int | None = None) -> Recipe:
    found = as_untuned(Recipe(group, form, "float32", chunk=chunk), SPECS, SMALL_L2)
    assert found is not None
    return found


def test_the_chain_that_runs_untuned_is_timed_first_and_kept_unless_another_is_faster() -> None:
    known = tuned(SQUARE, "gram", "plain", ties=("apply",))
    for start_us, kept in ((9.0, True), (11.0, False)):
        start = start_of(SQUARE, "plain")
        forms = estimates(SQUARE, ("gram", "plain"), "float32", known)
        search = ChainSearch(forms, known, SPECS, SMALL_L2, start)
        asked = walk(search, lambda recipe, start=start, us=start_us: ok(us if recipe == start else 10.0))
        assert asked[0] == start and len({recipe.form for recipe in asked}) == 2
        assert (search.recipe().picks == start.picks) == kept and search.recipe().timed


def test_smaller_batches_of_the_untuned_chain_run_untuned() -> None:
    known = tuned(BATCH, "gram")
    start = start_of(BATCH, "plain")  # a form whose products nothing was measured of
    search = ChainSearch(estimates(BATCH, ("gram",), "float32", known), known, SPECS, SMALL_L2, start, (1, 2, 4))
    asked = walk(search, lambda recipe: ok((1.0 if recipe.form == "plain" else 2.0) * recipe.group.batch))
    assert asked[2:] == [start_of(replace(BATCH, batch=batch), "plain") for batch in (1, 2, 4)]
    assert search.recipe().batch_costs == ((1, 1.0), (2, 2.0), (4, 4.0))


@pytest.mark.parametrize("start_us", [5.0, None])
def test_the_untuned_chain_is_timed_once_where_it_is_the_winners(start_us: float | None) -> None:
    known = tuned(SQUARE, "gram", "plain")  # of libraries
    start = start_of(SQUARE, "plain")
    forms = estimates(SQUARE, ("gram", "plain"), "float32", known)
    search = ChainSearch(forms, known, SPECS, SMALL_L2, start)
    untuned = Measurement("crashed") if start_us is None else ok(start_us)
    asked = walk(search, lambda recipe: untuned if recipe == start else ok(7.0))
    assert [recipe.form for recipe in asked] == ["plain", "gram"] and asked[0] == start
    assert search.recipe().form == ("gram" if start_us is None else "plain")
