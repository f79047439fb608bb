"""Extremely randomized regression trees (Geurts et al. 2006), all of a forest grown level by level at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import Floats, Ints

Bools = np.ndarray[Any, np.dtype[np.bool_]]

TRIED_AXES = 4  # axes a node draws, of which it takes the best cut
LEAST_SPLIT = 3  # samples of a node that is cut


@dataclass(frozen=True)
class _Cuts:
    """For each node of a level: whether it is cut, by which axis and where; else its samples' mean value."""

    is_cut: Bools
    axis: Ints
    where: Floats
    mean: Floats

    def children(self, points: Floats, item: Ints, node: Ints) -> Ints:
        """The node of the next level of each item, a row of ``points``, of a node that is cut."""
        first_child = 2 * (np.cumsum(self.is_cut) - 1)
        places = item * points.shape[1] + self.axis.take(node)
        below: Ints = first_child.take(node) + (points.ravel().take(places) > self.where.take(node))
        return below


def predict(
    points: Floats, values: Floats, queries: Floats, trees: int, rng: np.random.Generator
) -> tuple[Floats, Floats]:
    """Mean and standard deviation over the trees at ``queries`` (m, axes), grown on ``points`` (n, axes)."""
    answers = np.zeros(trees * len(queries))
    # The samples and queries of all trees, each with its node of the level; samples stand grouped by node.
    sample, sample_node = np.tile(np.arange(len(points)), trees), np.repeat(np.arange(trees), len(points))
    query, query_node = np.tile(np.arange(len(queries)), trees), np.repeat(np.arange(trees), len(queries))
    answer = np.arange(len(answers))
    while len(answer):
        cuts = _cut(points[sample], values[sample], sample_node, rng)
        goes_on = cuts.is_cut.take(query_node)
        answers[answer[~goes_on]] = cuts.mean[query_node[~goes_on]]
        query, query_node, answer = query[goes_on], query_node[goes_on], answer[goes_on]
        query_node = cuts.children(queries, query, query_node)
        goes_on = cuts.is_cut.take(sample_node)
        sample, sample_node = sample[goes_on], sample_node[goes_on]
        sample_node = cuts.children(points, sample, sample_node)
        order = np.argsort(sample_node, kind="stable")
        sample, sample_node = sample[order], sample_node[order]
    of_trees = answers.reshape(trees, len(queries))
    return of_trees.mean(axis=0), of_trees.std(axis=0)


def _cut(points: Floats, values: Floats, node: Ints, rng: np.random.Generator) -> _Cuts:
    """Of TRIED_AXES random axes, each cut at random, the one whose halves' values vary the least in themselves."""
    starts = np.flatnonzero(np.diff(node, prepend=-1))
    sizes, sums = np.diff(starts, append=len(node)), np.add.reduceat(values, starts)
    low, high = np.minimum.reduceat(points, starts), np.maximum.reduceat(points, starts)
    axes = np.argsort(rng.random(low.shape) + (high <= low), axis=1)[:, :TRIED_AXES]  # those that vary come first
    each = np.arange(len(starts))[:, None]
    low, high = low[each, axes], high[each, axes]
    where = low + (high - low) * rng.random(low.shape)
    is_left = points[np.arange(len(points))[:, None], axes[node]] <= where[node]
    left_sizes = np.add.reduceat(is_left, starts, dtype=np.float64)
    left_sums = np.add.reduceat(is_left * values[:, None], starts)
    right_sizes, right_sums = sizes[:, None] - left_sizes, sums[:, None] - left_sums
    possible = (left_sizes > 0) & (right_sizes > 0)
    gain = left_sums**2 / np.maximum(left_sizes, 1) + right_sums**2 / np.maximum(right_sizes, 1)
    best = np.where(possible, gain, -np.inf).argmax(axis=1)
    of_best = np.arange(len(starts)), best
    return _Cuts(possible[of_best] & (sizes >= LEAST_SPLIT), axes[of_best], where[of_best], sums / sizes)
