"""From the model options to the matrices to tune, grouped as the optimizer will run them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from dmuon_tune import recipe
from dmuon_tune.errors import UsageError
from dmuon_tune.matrices import Matrix, Selection, select, unmatched
from dmuon_tune.words import counted

from .output import warn


@dataclass(frozen=True)
class Workload:
    """A model's hidden matrices, what was left out, and the batches of equal shape."""

    label: str
    selection: Selection
    groups: tuple[recipe.Group, ...]


def chosen(args: argparse.Namespace) -> Workload | None:
    """That one, or None where none is named."""
    given = (args.preset, args.model, args.shapes)
    if any(each is not None for each in given) or args.include or args.exclude:
        return of(args)
    return None


def of(args: argparse.Namespace) -> Workload:
    """The workload that ``--preset``, ``--model`` or ``--shapes`` names; UsageError for none, several or no matrix."""
    given = [name for name in ("preset", "model", "shapes") if getattr(args, name) is not None]
    if len(given) != 1:
        which = " and ".join(f"--{name}" for name in given) or "nothing"
        raise UsageError(f"give one of --preset, --model, --shapes; {which} given")
    return _of_text(args) if given == ["shapes"] else _of_model(args)


def _of_text(args: argparse.Namespace) -> Workload:
    from dmuon_tune.models import shape_text

    if args.include or args.exclude:
        raise UsageError("--include and --exclude choose by parameter name; --shapes has none")
    written = shape_text.parse(args.shapes)
    matrices = tuple(Matrix(group.label(), group.rows, group.cols, group.batch) for group in written)
    cut = [piece for group in written for piece in recipe.groups([(group.rows, group.cols)] * group.batch)]
    return Workload(args.shapes, Selection(matrices, ()), tuple(dict.fromkeys(cut)))


def _of_model(args: argparse.Namespace) -> Workload:
    from dmuon_tune import models
    from dmuon_tune.models import presets

    found = presets.load(args.preset) if args.preset is not None else models.load(args.model)
    selection = select(found.parameters, args.include, args.exclude)
    for pattern in unmatched([*args.include, *args.exclude], (name for name, _ in found.parameters)):
        warn(f"pattern {pattern!r} matches no parameter of {found.label}")
    if not selection.matrices:
        count = counted(len(found.parameters), "parameter")
        raise UsageError(f"{found.label}: no hidden matrix among {count}; see --include")
    # In a fixed order, so that every source of one model's shapes gives the same groups in the same order.
    shapes = sorted(selection.shapes(), key=lambda shape: (shape[0] * shape[1], shape))
    return Workload(found.label, selection, tuple(dict.fromkeys(recipe.groups(shapes))))
