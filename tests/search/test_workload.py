"""The products of a model's groups and their order."""

from __future__ import annotations

from dmuon_tune.backends.probe import fingerprint
from dmuon_tune.kernel_specs import kernel, kernels, ops
from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, Recipe, chain
from dmuon_tune.search.recipes import cheapest_recipes
from dmuon_tune.search.workload import served_forms
from dmuon_tune.search.workload import workload as workload_of

WIDE = Group(2, 64, 256)
SQUARE = Group(1, 64, 64)
CPU = fingerprint("cpu")


def workload(groups: list[Group], dtype: str) -> dict[Problem, int]:
    return workload_of(groups, dtype, kernels(), CPU)


def test_weights_are_launches_times_flops_most_expensive_first() -> None:
    weights = workload([WIDE], "float16")
    assert list(weights.values()) == sorted(weights.values(), reverse=True)
    assert weights.keys() == chain(WIDE, "gram", "float16").keys()  # far from square: no plain form
    for problem, launches in chain(WIDE, "gram", "float16").items():
        assert weights[problem] == launches * ops()[problem.op].flops(problem)


def test_groups_that_share_a_product_add_up_and_forms_do_not() -> None:
    once, twice = workload([SQUARE], "float32"), workload([SQUARE, SQUARE], "float32")
    assert {problem: 2 * weight for problem, weight in once.items()} == twice
    gram = Problem("gram", 1, 64, 64, 64, "float32", "float32")
    launches = {form: chain(SQUARE, form, "float32")[gram] for form in ("plain", "gram")}
    assert launches["plain"] > launches["gram"]
    assert once[gram] == launches["plain"] * 64**3


def test_the_order_does_not_depend_on_the_groups_order() -> None:
    assert list(workload([WIDE, SQUARE], "float16")) == list(workload([SQUARE, WIDE], "float16"))


def test_the_cheaper_form_wins_and_a_missing_winner_leaves_a_form_out() -> None:
    forms = {form: chain(SQUARE, form, "float32") for form in ("plain", "gram")}
    even = dict.fromkeys(workload([SQUARE], "float32"), 1.0)
    recipes = {
        form: Recipe(SQUARE, form, "float32", cost_us=float(sum(products.values())))
        for form, products in forms.items()
    }
    cheaper = min(recipes.values(), key=lambda recipe: recipe.cost_us or 0)
    assert cheapest_recipes([SQUARE, SQUARE], "float32", even) == [cheaper]
    for form, other in (("plain", "gram"), ("gram", "plain")):
        only_here = forms[form].keys() - forms[other].keys()
        dear = {problem: 100.0 if problem in only_here else us for problem, us in even.items()}
        assert cheapest_recipes([SQUARE], "float32", dear) == [recipes[other]]
        without = {problem: us for problem, us in even.items() if problem not in only_here}
        assert cheapest_recipes([SQUARE], "float32", without) == [recipes[other]]
    assert cheapest_recipes([SQUARE], "float32", {}) == []
