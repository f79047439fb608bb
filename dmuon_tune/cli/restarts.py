"""``dmuon-tune restarts``: where the Gram form should return to X, for a set of coefficients."""

from __future__ import annotations

import argparse
from typing import Any

from dmuon_tune.coefficients import COEFFICIENTS, DEFAULT_COEFFICIENTS, CoefficientSet, Triple, coefficient_set
from dmuon_tune.errors import UsageError
from dmuon_tune.recipe import DEFAULT_STEPS
from dmuon_tune.restarts import MOST_GROWTH, PERTURBATION, best_restarts, choose_restarts
from dmuon_tune.words import counted

from . import options
from .output import note, print_json, say, table

MOST_SHOWN = 3  # restarts more than the chosen number are shown up to this many


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "restarts", parents=[options.common()], help="find the restarts of a set of coefficients",
        description="Find the steps before which the Gram form of Newton-Schulz should return to X and form its Gram "
        "matrix anew: those by which a rounding error of that matrix grows least. The growth is the largest |Q| on the "
        "way, over all singular values. Muon chooses the fewest restarts that keep it below "
        f"{MOST_GROWTH:g}.",
    )
    parser.add_argument(
        "--coefficients", default=DEFAULT_COEFFICIENTS, metavar="SET",
        help=f"{', '.join(COEFFICIENTS)}, or triples such as '4.1,-6.9,2.9;3.9,-6.3,2.6'; a single one repeats "
        f"(default: {DEFAULT_COEFFICIENTS})",
    )
    parser.add_argument(
        "--steps", type=options.positive, metavar="N", help=f"default: {DEFAULT_STEPS}, or as many as there are triples"
    )
    parser.add_argument(
        "--perturbation", type=float, default=PERTURBATION, metavar="X",
        help=f"most negative eigenvalue that rounding gives the Gram matrix (default: {PERTURBATION:g}, by fp16)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not -1.0 < args.perturbation <= 0.0:
        raise UsageError(f"--perturbation must be in (-1, 0], not {args.perturbation:g}")
    coefficients = read_coefficients(args.coefficients)
    made_for = DEFAULT_STEPS if coefficients.repeats else min(DEFAULT_STEPS, len(coefficients.triples))
    triples = coefficients.take(args.steps or made_for)
    chosen = choose_restarts(coefficients, len(triples), args.perturbation)
    rows: list[dict[str, Any]] = []
    for count in range(min(len(triples), max(MOST_SHOWN, len(chosen) + 1))):
        best = best_restarts(triples, count, args.perturbation, coefficients.norm_factor)
        restarts, growth = best if best else (None, None)  # None: it overflows whatever the places
        rows.append({"count": count, "restarts": restarts, "growth": growth, "chosen": restarts == chosen})
    if args.format == "json":
        print_json({"coefficients": args.coefficients, "steps": len(triples), "restarts": list(chosen), "best": rows})
        return 0
    note(f"{args.coefficients}, {counted(len(triples), 'step')}: restarts={chosen}")
    say(table(["count", "restarts", "growth", "chosen"], [list(row) for row in map(_shown, rows)]))
    return 0


def _shown(row: dict[str, Any]) -> tuple[Any, ...]:
    places = None if row["restarts"] is None else ",".join(map(str, row["restarts"])) or "none"
    growth = "overflows" if row["growth"] is None else f"{row['growth']:.3g}"
    return row["count"], places, growth, "yes" if row["chosen"] else ""


def read_coefficients(text: str) -> CoefficientSet:
    """A set by its name, or triples separated by semicolons."""
    if "," not in text:
        return coefficient_set(text)
    try:
        triples: list[Triple] = []
        for part in text.split(";"):
            a, b, c = map(float, part.split(","))
            triples.append((a, b, c))
    except ValueError:
        raise UsageError(f"--coefficients {text!r}: write triples such as '4.1,-6.9,2.9;3.9,-6.3,2.6'") from None
    return coefficient_set(triples[0] if len(triples) == 1 else triples)
