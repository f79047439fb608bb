"""Picks each group's recipe: the form whose chain of winners costs least."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dmuon_tune.problem import Problem
from dmuon_tune.recipe import Group, Recipe, chain, forms


def cheapest_recipes(groups: Iterable[Group], dtype: str, winner_us: Mapping[Problem, float]) -> list[Recipe]:
    """One recipe a group, in order, from the winners' microseconds a launch; a group whose every form has a product
    without a winner gets none."""
    recipes = []
    for group in dict.fromkeys(groups):
        costed = []
        for form in forms(group):
            products = chain(group, form, dtype)
            if products.keys() <= winner_us.keys():
                cost_us = sum(count * winner_us[problem] for problem, count in products.items())
                costed.append(Recipe(group, form, dtype, cost_us=cost_us))
        if costed:
            recipes.append(min(costed, key=lambda recipe: recipe.cost_us or 0.0))
    return recipes
