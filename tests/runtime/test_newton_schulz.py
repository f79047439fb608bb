"""Newton–Schulz: against an independent float64 iteration, over shapes, dtypes, coefficient sets and bad input."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.cache import Store
from dmuon_tune.coefficients import CoefficientSet
from dmuon_tune.errors import UsageError
from dmuon_tune.recipe import Group, Recipe
from dmuon_tune.runtime import COEFFICIENTS, GramNewtonSchulz, plan

MODES = (torch.inference_mode, torch.no_grad, torch.enable_grad)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain_float64(x: Tensor, triples: CoefficientSet, steps: int = 5) -> Tensor:
    """X ← aX + bXXᵀX + cXXᵀXXᵀX as written in the sources, on the matrix as stored."""
    y = x.double() / (triples.norm_factor * x.double().norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in triples.take(steps):
        cubic = y @ y.mT @ y
        y = a * y + b * cubic + c * cubic @ y.mT @ y
    return y


def polar(x: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(x.double(), full_matrices=False)
    return left @ right


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def with_form(form: str, group: Group, dtype: str, cache_file: Path) -> None:
    """Keep a recipe in the user's cache, as tuning would, so that the chain takes this form."""
    with Store.open(cache_file) as store:
        store.put_recipe(fingerprint("cpu"), Recipe(group, form, dtype))


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize(
    "shape", [(24, 80), (80, 24), (32, 32), (1, 40), (40, 1), (1, 1), (3, 17, 29), (2, 2, 33, 12), (5, 1)]
)
def test_equals_the_float64_iteration(name: str, shape: tuple[int, ...]) -> None:
    x = gaussian(*shape)
    got = GramNewtonSchulz(name, dtype="float32")(x)
    assert got.shape == x.shape and got.dtype == x.dtype and got.is_contiguous()
    # fp32 rounding, amplified by the product of the first coefficients (8.2 · 4.1 · 3.9 for the steepest set)
    assert error(got, plain_float64(x, COEFFICIENTS[name])) < 1e-4


@pytest.mark.parametrize("form", ["gram", "plain"])
@pytest.mark.parametrize("shape", [(2, 40, 40), (1, 48, 36)])
@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_forms_and_steps(form: str, shape: tuple[int, int, int], steps: int, cache_file: Path) -> None:
    with_form(form, Group(*shape), "float32", cache_file)
    x = gaussian(*shape)
    got = GramNewtonSchulz("jordan", steps=steps, dtype="float32")(x)
    assert error(got, plain_float64(x, COEFFICIENTS["jordan"], steps)) < 1e-4


@pytest.mark.parametrize("restarts", [(), (1,), (1, 2, 3, 4), (2, 4)])
def test_restarts_change_rounding_only(restarts: tuple[int, ...]) -> None:
    x = gaussian(20, 90)
    got = GramNewtonSchulz("you", restarts=restarts, dtype="float32")(x)
    assert error(got, plain_float64(x, COEFFICIENTS["you"])) < 2e-4


def low_rank_plus_tail(rows: int, cols: int) -> Tensor:
    rank = rows // 16
    return gaussian(rows, rank, seed=1) @ gaussian(rank, cols, seed=2) + 1e-2 * gaussian(rows, cols, seed=3)


def power_law(rows: int, cols: int) -> Tensor:
    left = torch.linalg.qr(gaussian(rows, rows, seed=4))[0]
    right = torch.linalg.qr(gaussian(cols, rows, seed=5))[0]
    return left @ torch.diag(torch.logspace(0, -5, rows)) @ right.T


def rounded_plain(x: Tensor, triples: CoefficientSet, dtype: torch.dtype) -> Tensor:
    """The plain form with every matrix kept in ``dtype`` and fp32 accumulation: what peers run."""

    def kept(value: Tensor) -> Tensor:
        return value.to(dtype).float()

    y = kept(x / (triples.norm_factor * x.norm() + 1e-7))
    for a, b, c in triples.take(5):
        gram = kept(y @ y.mT)
        y = kept(a * y + kept(b * gram + c * (gram @ gram)) @ y)
    return y


@pytest.mark.parametrize(
    ("name", "make"),
    [
        pytest.param("you", lambda: gaussian(256, 1024), id="gaussian-you"),
        pytest.param("polar-express-1.05", lambda: gaussian(256, 1024), id="gaussian"),
        pytest.param("polar-express-1.05", lambda: gaussian(512, 512), id="square"),
        pytest.param("polar-express-1.05", lambda: low_rank_plus_tail(256, 1024), id="low-rank"),
        pytest.param("polar-express-1.05", lambda: power_law(256, 1024), id="power-law"),
    ],
)
def test_fp16_gram_form_is_as_good_as_plain(name: str, make: Callable[[], Tensor], cache_file: Path) -> None:
    x = make()
    with_form("gram", Group(1, *x.shape), "float16", cache_file)
    want = polar(x)
    got = error(GramNewtonSchulz(name, dtype="float16")(x), want)
    assert got <= 1.1 * error(rounded_plain(x, COEFFICIENTS[name], torch.float16), want)


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 0.01), ("bfloat16", 0.06)])
@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (64, 64)])
def test_half_precision_follows_the_iteration(dtype: str, bound: float, shape: tuple[int, int]) -> None:
    x = gaussian(*shape)
    assert error(GramNewtonSchulz("jordan", dtype=dtype)(x), plain_float64(x, COEFFICIENTS["jordan"])) < bound


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_sets_bring_singular_values_near_one(name: str) -> None:
    values = torch.linalg.svdvals(GramNewtonSchulz(name, dtype="float32")(gaussian(32, 256)))
    assert 0.6 < values.min() and values.max() < 1.25


def test_long_polar_express_converges() -> None:
    x = gaussian(24, 40)
    got = GramNewtonSchulz("polar-express-1.01", steps=10, restarts=(2, 4, 6, 8), dtype="float32")(x)
    assert error(got, polar(x)) < 1e-5


def test_scale_of_the_input_does_not_matter() -> None:
    x = gaussian(30, 70)
    run = GramNewtonSchulz(dtype="float16")
    assert torch.equal(run(x), run(x * 2.0**20))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_result_has_the_inputs_dtype_and_input_is_kept(dtype: torch.dtype) -> None:
    x = gaussian(6, 20).to(dtype)
    before = x.clone()
    got = GramNewtonSchulz(dtype=torch.float32)(x)
    assert got.dtype == dtype and torch.equal(x, before)
    assert error(got, plain_float64(x, COEFFICIENTS["polar-express-1.05"])) < 1e-2


def test_strided_input_and_batches_agree_with_single_matrices() -> None:
    x = gaussian(7, 20, 12)
    run = GramNewtonSchulz(dtype="float32")
    batched = run(x.mT)
    for index in range(7):
        assert error(run(x[index].mT), batched[index].double()) < 1e-5


def test_large_batches_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmuon_tune.recipe.MAX_BATCH_ELEMENTS", 3 * 8 * 19)
    x = gaussian(8, 8, 19)
    run = GramNewtonSchulz(dtype="float32")
    assert error(run(x), plain_float64(x, COEFFICIENTS["polar-express-1.05"])) < 1e-4
    assert [group.label() for _, group in run._chains] == ["3x8x19", "2x8x19"]


@pytest.mark.parametrize("form", ["gram", "plain"])
def test_a_recipes_pieces_run_one_after_another(form: str, cache_file: Path) -> None:
    group = Group(7, 12, 20)
    with Store.open(cache_file) as store:
        store.put_recipe(fingerprint("cpu"), Recipe(group, form, "float32", chunk=3))
    x = gaussian(7, 12, 20)
    run = GramNewtonSchulz(dtype="float32")
    assert error(run(x), plain_float64(x, COEFFICIENTS["polar-express-1.05"])) < 1e-4
    (planned,) = run._planned.values()
    assert set(planned.launches) == {3, 2}


def test_zero_gives_zero_and_non_finite_stays_in_its_matrix() -> None:
    x = gaussian(4, 6, 10)
    x[0] = 0
    x[1, 2, 3] = float("nan")
    x[2, 0, 0] = float("inf")
    got = GramNewtonSchulz(dtype="float16")(x)
    assert torch.equal(got[0], torch.zeros(6, 10))
    assert got[1].isnan().any() and got[2].isnan().any() and got[3].isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "exponent"),
    [
        *((dtype, e) for dtype in (torch.float32, torch.bfloat16) for e in (-100, -30, 17, 100)),
        (torch.float64, 900), (torch.float64, -900), (torch.float16, 12),
    ],
)
def test_the_scale_of_the_input_does_not_matter_at_any_size(dtype: torch.dtype, exponent: int) -> None:
    x = gaussian(2, 6, 10).to(dtype)
    run = GramNewtonSchulz(dtype="float32")
    torch.testing.assert_close(run(x * 2.0**exponent), run(x))


def test_eps_is_added_to_the_norm() -> None:
    x = gaussian(2, 6, 10)
    x[1] = x[0] * 2.0**-40
    got = GramNewtonSchulz("jordan", steps=1, dtype="float32", eps=1e-3)(x)
    want = x.double() / (x.double().norm(dim=(-2, -1), keepdim=True) + 1e-3)
    a, b, c = COEFFICIENTS["jordan"].triples[0]
    cubic = want @ want.mT @ want
    assert error(got[1], (a * want + b * cubic + c * cubic @ want.mT @ want)[1]) < 1e-5


@pytest.mark.parametrize("first", MODES, ids=lambda mode: mode.__name__)
def test_calls_in_any_autograd_mode_may_follow_each_other(first: Any) -> None:
    x, called = gaussian(2, 6, 10), GramNewtonSchulz()
    with first():
        want = called(x)
    for mode in MODES:
        with mode():
            assert torch.equal(called(x), want)
            assert torch.equal(called(gaussian(3, 6, 10)), GramNewtonSchulz()(gaussian(3, 6, 10)))


@pytest.mark.parametrize("through", [lambda made: made, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_threads_may_share_one(through: Callable[[GramNewtonSchulz], GramNewtonSchulz]) -> None:
    inputs = [gaussian(4, 24 + 8 * index, 40, seed=index) for index in range(4)]
    wanted = [GramNewtonSchulz()(x) for x in inputs]
    shared = through(GramNewtonSchulz())

    def equal(index: int) -> bool:
        return all(torch.equal(shared(inputs[index]), wanted[index]) for _ in range(40))

    with ThreadPoolExecutor(len(inputs)) as pool:
        assert all(pool.map(equal, range(len(inputs))))


def test_empty_batch() -> None:
    assert GramNewtonSchulz()(torch.empty(0, 3, 4)).shape == (0, 3, 4)


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_few_steps_have_the_restarts_that_fit(name: str) -> None:
    x = torch.randn(1, 6, 9)
    for steps in range(1, min(3, len(COEFFICIENTS[name].triples)) + 1):
        run = GramNewtonSchulz(name, steps=steps)
        assert all(step < steps for step in run.restarts) and bool(run(x).isfinite().all())
        given = GramNewtonSchulz(name, steps=steps, restarts=(), plan=plan([Group(1, 6, 9)], steps=steps, restarts=()))
        assert given.restarts == ()
        plan([Group(1, 6, 9)], steps=steps)
    with pytest.raises(UsageError, match="restarts of 2 steps must be from 1 to 1, not 2"):
        plan([Group(1, 6, 9)], steps=2, restarts=(2,))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"coefficients": "polar"}, "polar-express-1.05"),
        ({"coefficients": "you", "steps": 6}, "5 steps"),
        ({"coefficients": ((1.0, 2.0),)}, "(a, b, c)"),
        ({"coefficients": (float("nan"), 1.0, 1.0)}, "finite"),
        ({"steps": 0}, "at least 1"),
        ({"restarts": (0,)}, "restarts"),
        ({"dtype": "float8"}, "float8"),
        ({"eps": -1e-7}, "eps"),
        ({"eps": float("inf")}, "eps"),
        ({"eps": "a"}, "eps must be a finite number of at least 0, not 'a'"),
        ({"steps": 2.5}, "steps must be an integer of at least 1, not 2.5"),
        ({"restarts": 2}, "restarts must be a sequence of integers of at least 1, not 2"),
        ({"restarts": (2, 7)}, "restarts of 5 steps must be from 1 to 4, not 7"),
        ({"restarts": (1,), "steps": 1}, "restarts of 1 step must be none, (), not 1"),
        ({"coefficients": 3}, "not 3"),
        ({"graphs": 1}, "graphs must be True or False, not 1"),
        ({"plan": "qwen2.5-7b"}, "plan must be a Plan, not 'qwen2.5-7b'"),
        ({"layers": "cache.sqlite"}, "layers must be a Layers, not 'cache.sqlite'"),
        ({"on_miss": "guess"}, "on_miss or DMUON_TUNE_ON_MISS: unknown policy 'guess'"),
    ],
)
def test_bad_options_are_named(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named.replace("(", r"\(").replace(")", r"\)")):
        GramNewtonSchulz(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("x", [torch.ones(4), torch.ones(3, 0), torch.ones(2, 2, dtype=torch.int64)])
def test_bad_input_is_refused(x: Tensor) -> None:
    with pytest.raises(UsageError, match="Newton–Schulz needs"):
        GramNewtonSchulz()(x)


@pytest.mark.parametrize("x", [[1, 2], None, torch.ones(3, 4).to_sparse()], ids=["list", "none", "sparse"])
def test_what_is_no_dense_tensor_is_refused(x: Any) -> None:
    orthogonalize = GramNewtonSchulz()
    orthogonalize(torch.ones(3, 4))
    with pytest.raises(UsageError, match="Newton–Schulz needs a dense tensor, not "):
        orthogonalize(x)
