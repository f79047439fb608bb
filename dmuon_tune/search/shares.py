"""How a run's budget is divided among products, races of finalists and whole chains."""

from __future__ import annotations

CHAINS_SHARE = 0.15  # of the budget, for whole chains after their products
CHAINS_LEAST_S = 20.0  # what a group's first chains take where their kernels compile anew ...
CHAINS_MOST_SHARE = 0.4  # ... but never more than this of a short budget
RACE_S = 2.0  # one problem's race without a budget: as long as its rounds may take
RACES_SHARE = 0.1  # of the budget, for races of finalists between products and chains


def chains_share_s(budget_s: float) -> float:
    """The seconds of a budget that are kept for whole chains."""
    return max(CHAINS_SHARE * budget_s, min(CHAINS_LEAST_S, CHAINS_MOST_SHARE * budget_s))


def races_share_s(budget_s: float) -> float:
    """The seconds of a budget that are kept for races of finalists."""
    return RACES_SHARE * budget_s
