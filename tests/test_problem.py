"""Properties of the L0 types: round trips, refused input, spaces, keys of equality, and the chain of products."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmuon_tune import space
from dmuon_tune.device import DeviceFingerprint, Toolchain
from dmuon_tune.errors import UsageError
from dmuon_tune.kernel_specs.polar_small import schedule as polar_schedule
from dmuon_tune.measurement import STATUSES, Measurement
from dmuon_tune.problem import DTYPES, EPILOGUES, LAYOUTS, MAX_DIM, Problem
from dmuon_tune.recipe import FORMS, MAX_BATCH_ELEMENTS, Group, Pick, Recipe, chain, forms, groups, spans

extents = st.integers(1, MAX_DIM)
names = st.text(min_size=1, max_size=20)
times = st.floats(1e-3, 1e9, allow_nan=False)
problems = st.builds(
    Problem, op=names, batch=extents, m=extents, n=extents, k=extents, dtype=st.sampled_from(DTYPES),
    out_dtype=st.sampled_from(DTYPES), layout=st.sampled_from(LAYOUTS), epilogue=st.sampled_from(EPILOGUES),
)
group_strategy = st.builds(
    Group, batch=st.integers(1, 64), rows=st.integers(1, 4096), cols=st.integers(1, 4096)
)
devices = st.builds(
    DeviceFingerprint, name=names, arch=st.sampled_from(["sm_80", "sm_90", "cpu-x86_64-avx2"]), sm_count=extents,
    smem_per_block_bytes=extents, l2_bytes=extents, memory_bytes=extents,
)


def through_json(fields: dict[str, object]) -> dict[str, object]:
    result: dict[str, object] = json.loads(json.dumps(fields))
    return result


@given(problems)
def test_problem_round_trip(problem: Problem) -> None:
    assert Problem.from_dict(json.loads(problem.canonical_json())) == problem
    assert problem.has_c == ("c" in problem.epilogue) and problem.has_identity == ("i" in problem.epilogue)


@given(problems, st.sampled_from([field.name for field in dataclasses.fields(Problem)]), st.data())
def test_every_field_of_a_problem_shows_in_its_json(problem: Problem, field: str, data: st.DataObject) -> None:
    other = dataclasses.replace(problem, **{field: getattr(data.draw(problems), field)})
    assert (other == problem) == (other.canonical_json() == problem.canonical_json())


@given(st.sampled_from(["batch", "m", "n", "k"]), st.one_of(st.integers(max_value=0), st.integers(MAX_DIM + 1)))
def test_extent_outside_its_range_is_a_usage_error(axis: str, extent: int) -> None:
    with pytest.raises(UsageError, match=f"gram: {axis} must be") as error:
        Problem(**{"op": "gram", "batch": 1, "m": 2, "n": 2, "k": 2, axis: extent})
    assert "\n" not in str(error.value) and error.value.exit_code == 2


@pytest.mark.parametrize("extent", [True, 2.0, "2", None])
def test_extent_that_is_no_integer_is_a_usage_error(extent: object) -> None:
    with pytest.raises(UsageError, match="m must be an integer"):
        Problem("gram", 1, extent, 2, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "allowed"),
    [("dtype", DTYPES), ("out_dtype", DTYPES), ("layout", LAYOUTS), ("epilogue", EPILOGUES)],
)
def test_unknown_word_names_the_choices(field: str, allowed: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as error:
        Problem(**{"op": "gram", "batch": 1, "m": 2, "n": 2, "k": 2, field: "float8"})
    assert "'float8'" in str(error.value) and all(word in str(error.value) for word in allowed)


@dataclasses.dataclass(frozen=True)
class Config:
    """A space of 3 × 2 configurations with one fixed field."""

    tile: int = space.choice(32, (16, 32, 64))
    order: str = space.choice("row", ("row", "col"))
    fixed: int = 7


def test_space_is_enumerated_whole_and_in_order() -> None:
    configs = list(space.enumerate_space(Config))
    assert space.size(Config) == len(configs) == len(set(configs)) == 6
    assert [(config.tile, config.order) for config in configs[:3]] == [(16, "row"), (16, "col"), (32, "row")]
    assert Config() in configs and {config.fixed for config in configs} == {7}


@pytest.mark.parametrize("config", list(space.enumerate_space(Config)), ids=space.config_json)
def test_config_round_trip(config: Config) -> None:
    assert space.config_from_dict(Config, json.loads(space.config_json(config))) == config


@pytest.mark.parametrize("fields", [{}, {"tile": 16, "order": "row"}, {"tile": 1, "order": "row", "fixed": 7, "x": 0}])
def test_fields_of_another_config_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="Config has fields"):
        space.config_from_dict(Config, fields)


def test_a_default_outside_its_choices_is_refused() -> None:
    with pytest.raises(ValueError, match="default 3 is not among"):
        space.choice(3, (1, 2))


@given(st.lists(times, min_size=1, max_size=50), st.floats(0, 1))
def test_measurement_round_trip_and_order(samples: list[float], error: float) -> None:
    measured = Measurement.from_samples(samples, error, {"registers": 32}, "log")
    assert Measurement.from_dict(through_json(measured.to_dict())) == measured  # type: ignore[arg-type]
    assert measured.p20_us is not None and measured.median_us is not None and measured.p80_us is not None
    assert min(samples) <= measured.p20_us <= measured.median_us <= measured.p80_us <= max(samples)
    assert {measured.p20_us, measured.median_us, measured.p80_us} <= set(samples)


@pytest.mark.parametrize("status", [status for status in STATUSES if status != "ok"])
def test_a_failure_carries_its_log_and_no_times(status: str) -> None:
    failed = Measurement(status, log="ptxas: error")
    assert not failed.ok and Measurement.from_dict(failed.to_dict()) == failed
    with pytest.raises(ValueError, match="cannot carry times"):
        Measurement(status, 1.0, 1.0, 1.0, (1.0,))


@pytest.mark.parametrize("arguments", [("ok",), ("ok", 1.0, 1.0, 1.0), ("ok", None, 1.0, 1.0, (1.0,)), ("fine",)])
def test_a_measurement_without_times_is_not_ok(arguments: tuple[object, ...]) -> None:
    with pytest.raises(ValueError):
        Measurement(*arguments)  # type: ignore[arg-type]


@given(devices)
def test_device_round_trip_and_the_name_decides_nothing(device: DeviceFingerprint) -> None:
    assert DeviceFingerprint.from_dict(device.to_dict()) == device
    renamed = dataclasses.replace(device, name=device.name + "x")
    assert renamed == device and hash(renamed) == hash(device) and renamed.limits() == device.limits()
    assert (device.kind == "cuda") == (device.sm > 0)


@given(st.dictionaries(names, names))
def test_toolchain_round_trip(versions: dict[str, str]) -> None:
    toolchain = Toolchain("tilelang", tuple(sorted(versions.items())))
    assert Toolchain.from_dict(through_json(toolchain.to_dict())) == toolchain


@given(
    group_strategy, st.sampled_from(FORMS), st.sampled_from(DTYPES), st.integers(1, 8),
    st.lists(st.integers(1, 7), max_size=3), st.none() | times, st.none() | st.integers(1, 9), st.booleans(),
)
def test_recipe_round_trip(
    group: Group, form: str, dtype: str, steps: int, restarts: list[int], cost_us: float | None, chunk: int | None,
    timed: bool,
) -> None:
    recipe = Recipe(group, form, dtype, steps, tuple(restarts), cost_us)
    if timed:
        picks = tuple(Pick(problem, f"{problem.op}.library", {"x": [1]}, "ab") for problem in recipe.products())
        recipe = dataclasses.replace(
            recipe, p20_us=1.0, p80_us=2.0, chunk=chunk, picks=picks, batch_costs=((1, 0.5), (2, 1.0))
        )
    assert recipe.timed == timed
    assert Recipe.from_dict(through_json(recipe.to_dict())) == recipe


@given(group_strategy, st.sampled_from(FORMS), st.none() | st.integers(1, 9))
def test_a_cut_recipe_runs_the_same_products_on_every_matrix(group: Group, form: str, chunk: int | None) -> None:
    whole, cut = Recipe(group, form, "float16"), Recipe(group, form, "float16", chunk=chunk)
    assert sum(cut.pieces) == group.batch and max(cut.pieces) - min(cut.pieces) <= 1
    assert chunk is None or max(cut.pieces) <= chunk and len(cut.pieces) == -(-group.batch // chunk)

    def matrices(recipe: Recipe) -> Counter[Problem]:
        count: Counter[Problem] = Counter()
        for problem, launches in recipe.products().items():
            count[dataclasses.replace(problem, batch=1)] += launches * problem.batch
        return count

    assert matrices(cut) == matrices(whole)


@given(group_strategy)
def test_group_sides(group: Group) -> None:
    assert group.m <= group.n and {group.m, group.n} == {group.rows, group.cols}
    assert (group.layout == "row") == (group.rows <= group.cols)


shapes = st.lists(
    st.sampled_from([(64, 64), (8192, 8192), (8192, 28672), (28672, 8192), (2**15, 2**15), (1, 7)]), max_size=40
)


@given(shapes)
def test_groups_partition_the_matrices_exactly(matrices: list[tuple[int, int]]) -> None:
    cut = groups(matrices)
    total: Counter[tuple[int, int]] = Counter()
    for group in cut:
        total[group.rows, group.cols] += group.batch
        assert group.batch == 1 or group.batch * group.rows * group.cols <= MAX_BATCH_ELEMENTS
    assert total == Counter(matrices)
    assert list(dict.fromkeys((group.rows, group.cols) for group in cut)) == list(dict.fromkeys(matrices))
    for shape in set(matrices):
        batches = [group.batch for group in cut if (group.rows, group.cols) == shape]
        assert max(batches) - min(batches) <= 1


def flops(problem: Problem) -> int:
    """Symmetric results (an m×m product of this chain) counted once."""
    multiplied = problem.batch * problem.m * problem.n * problem.k
    return 2 * multiplied if problem.op == "apply" else multiplied


@given(group_strategy)
def test_gram_chain_flops(group: Group) -> None:
    """5 steps, one restart: 6m²n + 14m³ a matrix."""
    total = sum(count * flops(problem) for problem, count in chain(group, "gram", "float16").items())
    assert total == group.batch * (6 * group.m**2 * group.n + 14 * group.m**3)


def counted(steps: int, restarts: tuple[int, ...]) -> Counter[str]:
    """Products of the Gram form, walked step by step as its definition reads."""
    count: Counter[str] = Counter(gram=1)  # R = XXᵀ
    fresh = True
    for step in range(steps):
        if step and step in restarts:
            count["apply"] += 1  # X ← QX
            count["gram"] += 1
            fresh = True
        count["gemm_symmetric"] += 1  # Z = cR² + bR
        count["gemm_symmetric"] += not fresh  # Q ← QZ + aQ
        fresh = False
        if step + 1 < steps and step + 1 not in restarts:
            count["gemm_symmetric"] += 2  # S = RZ + aR, R ← SZ + aS
    count["apply"] += 1
    return count


@given(group_strategy, st.integers(1, 9), st.sets(st.integers(0, 10), max_size=4))
def test_gram_chain_equals_the_walk(group: Group, steps: int, restarts: set[int]) -> None:
    products = chain(group, "gram", "bfloat16", steps, tuple(sorted(restarts)))
    by_op: Counter[str] = Counter()
    for problem, count in products.items():
        by_op[problem.op] += count
    assert by_op == counted(steps, tuple(restarts))
    assert {problem.op: problem.epilogue for problem in products} == {
        "gram": "none", "gemm_symmetric": "c", "apply": "none"
    }
    assert all(count > 0 for count in products.values())


@given(group_strategy, st.integers(1, 9), st.sets(st.integers(0, 10), max_size=4))
def test_the_span_form_is_the_gram_form_with_a_launch_for_each_span(
    group: Group, steps: int, restarts: set[int]
) -> None:
    given_restarts = tuple(sorted(restarts))
    separate, fused = (chain(group, form, "bfloat16", steps, given_restarts) for form in ("gram", "span"))
    lengths = spans(steps, restarts)
    assert sum(lengths) == steps and min(lengths) > 0
    ops, kept = [problem.op for problem in fused], {p: n for p, n in fused.items() if p.op != "gram_span"}
    assert ops == ["gram", *["gram_span"] * len(set(lengths)), "apply"]  # a chain's last is what ends it
    assert kept == {problem: count for problem, count in separate.items() if problem.op != "gemm_symmetric"}
    whole = {int(p.epilogue[1:]): n for p, n in fused.items() if p.op == "gram_span"}
    assert whole == Counter(lengths) and sum(whole.values()) == kept[next(iter(fused))]


@given(group_strategy, st.integers(1, 9), st.sampled_from(["gram", "plain", "span"]))
def test_chain_problems_fit_the_group(group: Group, steps: int, form: str) -> None:
    for problem in chain(group, form, "float16", steps):
        assert (problem.batch, problem.m) == (group.batch, group.m)
        assert problem.layout == (group.layout if problem.op in ("gram", "apply") else "row")
        assert math.prod((problem.m, problem.n, problem.k)) in (group.m**2 * group.n, group.m**3)


@given(group_strategy, st.sampled_from(DTYPES))
def test_the_plain_form_is_tried_near_square_and_in_bf16_and_fused_ones_in_16_bits(group: Group, dtype: str) -> None:
    assert forms(group, dtype)[0] == "gram"
    assert ("plain" in forms(group, dtype)) == (group.n < 2 * group.m or dtype == "bfloat16")
    assert ("small" in forms(group, dtype)) == ("span" in forms(group, dtype)) == (dtype != "float32")


@given(group_strategy, st.integers(1, 9), st.sets(st.integers(0, 10), max_size=4))
def test_the_small_form_is_one_launch_that_names_its_steps(group: Group, steps: int, restarts: set[int]) -> None:
    ((problem, count),) = chain(group, "small", "float16", steps, tuple(restarts)).items()
    assert (count, problem.op, problem.m, problem.n, problem.k) == (1, "polar_small", group.m, group.n, group.m)
    assert polar_schedule(problem) == (steps, tuple(sorted(step for step in restarts if 0 < step < steps)))
