"""``dmuon-tune shapes``: a model's matrices with counts, and what was left out and why."""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import Any

from dmuon_tune.words import counted, name_patterns

from . import options, workload
from .output import note, print_json, say, table


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "shapes", parents=[options.common(), options.model()], help="list a model's matrix shapes with counts",
        description="List a model's hidden matrices by shape with counts, and what is left out and why.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    found = workload.of(args)
    if args.format == "json":
        print_json(_json(found))
        return 0
    selection = found.selection
    note(
        f"{found.label}: {counted(len(selection.shapes()), 'matrix', 'matrices')} in "
        f"{counted(len(selection.counts()), 'shape')}, {counted(len(selection.left_out), 'parameter')} left out"
    )
    say(table(["rows", "cols", "count", "parameters"], _matrix_rows(found)))
    if selection.left_out:
        say()
        say(table(["left_out", "count", "shape", "parameters"], _left_out_rows(found)))
    return 0


def _matrix_rows(found: workload.Workload) -> list[list[Any]]:
    named: dict[tuple[int, int], list[str]] = defaultdict(list)
    for matrix in found.selection.matrices:
        named[matrix.rows, matrix.cols].append(matrix.name)
    counts = found.selection.counts()
    ordered = sorted(counts, key=lambda shape: (shape[0] * shape[1], shape))
    return [[*shape, counts[shape], name_patterns(named[shape])] for shape in ordered]


def _left_out_rows(found: workload.Workload) -> list[list[Any]]:
    named: dict[tuple[str, str], list[str]] = defaultdict(list)
    for left in found.selection.left_out:
        named[left.reason, "x".join(map(str, left.shape)) or "scalar"].append(left.name)
    return [[reason, len(names), shape, name_patterns(names)] for (reason, shape), names in sorted(named.items())]


def _json(found: workload.Workload) -> dict[str, Any]:
    named: dict[tuple[int, int], list[str]] = defaultdict(list)
    for matrix in found.selection.matrices:
        named[matrix.rows, matrix.cols].append(matrix.name)
    return {
        "model": found.label,
        "matrices": [
            {"rows": rows, "cols": cols, "count": count, "names": named[rows, cols]}
            for rows, cols, count, _ in _matrix_rows(found)
        ],
        "groups": [{"batch": group.batch, "rows": group.rows, "cols": group.cols} for group in found.groups],
        "left_out": [
            {"name": left.name, "shape": list(left.shape), "reason": left.reason}
            for left in found.selection.left_out
        ],
    }
