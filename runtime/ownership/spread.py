"""Names the owners: patterns to nodes, and to each owner such matrices that a layer's lie far apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .instance import Counts, Instance

Owners = NDArray[np.int64]


def over_nodes(instance: Instance, counts: Counts, nodes: int) -> Counts:
    """The same patterns, dealt out to nodes (of equally many neighbouring owners) to and fro, the longest first: each
    node gets as many long ones, so that its network carries no more than another's."""
    owners = instance.owners
    longest = np.argsort(-instance.loads(counts), kind="stable")
    dealt = np.arange(owners).reshape(owners // nodes, nodes)
    dealt[1::2] = dealt[1::2, ::-1]
    return counts[:, longest[dealt.T.reshape(-1)]]


def owners_of(instance: Instance, counts: Counts, layers: Sequence[int], nodes: int) -> Owners:
    """Each matrix's owner. Those of one layer go to owners that hold none of it yet, of nodes that hold the fewest; of
    equal ones to that which lacks most matrices of the class."""
    lacking, node = counts.copy(), np.arange(instance.owners) // (instance.owners // nodes)
    owner = np.empty(len(layers), dtype=np.int64)
    for per_class in _by_layer(instance, layers):
        held = np.zeros(instance.owners, dtype=np.int64)
        for kind, places in per_class:
            while places:
                by_node = held.reshape(nodes, -1).sum(axis=1)
                chosen = _next(lacking[kind], held, by_node, node)[: len(places)]
                owner[places[: len(chosen)]] = chosen
                lacking[kind, chosen] -= 1
                held[chosen] += 1
                places = places[len(chosen) :]
    return owner


def _by_layer(instance: Instance, layers: Sequence[int]) -> list[list[tuple[int, list[int]]]]:
    """For each layer, in order: (class, its matrices there)."""
    found: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for kind, places in enumerate(instance.members):
        for place in places:
            found[layers[place]][kind].append(place)
    return [list(found[layer].items()) for layer in sorted(found)]


def _next(lacking: Owners, held: Owners, held_by_node: Owners, node: Owners) -> Owners:
    """The owners that lack a matrix of the class, in the order in which they get one each."""
    candidates = np.flatnonzero(lacking)
    within = candidates[np.lexsort((candidates, -lacking[candidates], held[candidates], node[candidates]))]
    firsts = np.searchsorted(node[within], node[within])  # where a candidate's node begins
    turn = np.arange(len(within)) - firsts  # so that nodes take turns
    order = np.lexsort((within, -lacking[within], held_by_node[node[within]] + turn, held[within]))
    ordered = within[order]
    alike: Owners = ordered[held[ordered] == held[ordered[0]]]
    return alike
