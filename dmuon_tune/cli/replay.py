"""``dmuon-tune replay``: runs samplers against a measured space, without a device, and says how far each comes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmuon_tune.errors import UsageError
from dmuon_tune.words import counted

from . import caches, options
from .output import check_writable, note, print_json, say, table, write_file

if TYPE_CHECKING:
    from dmuon_tune.search.record import Record
    from dmuon_tune.search.replay import Curve


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "replay", parents=[options.common(), options.cache()],
        help="compare samplers on a measured space",
        description="Run samplers against kernels' spaces as a cache or an exported record holds them, without a "
        "device, and print the fraction of the best recorded time that each reaches in how many evaluations: median, "
        "10th and 90th percentile over the seeds. A configuration that was not measured is never picked.",
    )
    source = parser.add_argument_group("records")
    source.add_argument("--problem", metavar="LABEL", help="only problems whose label begins so, such as 'gram 1x2048'")
    source.add_argument("--kernel", metavar="NAME", help="only this kernel, such as gram.triton")
    source.add_argument(
        "--least", type=options.positive, default=100, metavar="N",
        help="leave out spaces with fewer measured configurations (default: 100)",
    )
    source.add_argument(
        "--record", type=options.place, metavar="FILE", action="append",
        help="an exported record (repeatable), no cache",
    )
    source.add_argument(
        "--export", type=options.place, metavar="FILE", help="write the one record chosen to this file; replay nothing"
    )
    how = parser.add_argument_group("replay")
    how.add_argument(
        "--samplers", type=options.names, default=("combined", "tpe", "forest", "random"), metavar="NAMES",
        help="such as combined,random (default: combined,tpe,forest,random)",
    )
    how.add_argument("--seeds", type=options.positive, default=20, metavar="N", help="runs of each (default: 20)")
    how.add_argument(
        "--evaluations", type=options.positive, default=100, metavar="N", help="length of a run (default: 100)"
    )
    how.add_argument(
        "--workers", type=options.positive, default=1, metavar="N",
        help="processes that compile beside the one that times, for the seconds that a search takes (default: 1)",
    )
    how.add_argument(
        "--plot", type=options.place, metavar="FILE", help="also draw the curves, such as replay.png; needs matplotlib"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from dmuon_tune.search.replay import plot, replay

    image = Path(args.plot) if args.plot else None
    plt = _pyplot(image) if image else None
    found = _records(args)
    if args.export:
        return _export(found, args.export)
    curves = replay(found, args.samplers, args.evaluations, args.seeds, args.workers)
    if args.format == "json":
        print_json({"seeds": args.seeds, "curves": [_json(curve) for curve in curves]})
    else:
        _print(curves)
    if image is not None:
        write_file(image, plot(curves, image.suffix[1:], plt))
        note(f"plot in {args.plot}")
    return 0


def _pyplot(path: Path) -> Any:
    """matplotlib.pyplot, where it can write ``path``: said before the replay rather than after it."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise UsageError("--plot needs matplotlib; run: pip install 'dmuon-tune[report]'") from error
    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in kinds:
        raise UsageError(f"--plot {path}: the name must end in one of {', '.join(kinds)}")
    check_writable("--plot", path)
    return plt


def _records(args: argparse.Namespace) -> list[Record]:
    from dmuon_tune.cache import user_cache_path
    from dmuon_tune.search.record import Record, records

    if args.record:
        if args.cache or args.problem or args.kernel:
            raise UsageError("--record names whole files; --cache, --problem and --kernel choose from a cache")
        return [Record.read(path) for path in args.record]
    path = args.cache or user_cache_path()
    with caches.known(args.cache, may_be_new=args.cache is None) as store:  # as for 'show'
        found = records(
            store,
            lambda problem, kernel: args.kernel in (None, kernel) and problem.label().startswith(args.problem or ""),
        )
    if not found:
        raise UsageError(f"{path} holds no measured space that --problem and --kernel choose; see 'dmuon-tune show'")
    large = [record for record in found if len(record.rows) >= args.least]
    if not large:
        raise UsageError(
            f"the largest of {len(found)} spaces, {found[0].kernel} for {found[0].problem}, has {len(found[0].rows)} "
            f"measured configurations; measure more of it with 'dmuon-tune tune --trials all', or lower --least"
        )
    return large


def _export(found: list[Record], path: str) -> int:
    if len(found) > 1:
        raise UsageError(f"--export writes one record, {len(found)} are chosen; choose with --problem and --kernel")
    found[0].write(path)
    rows = counted(len(found[0].rows), "configuration")
    note(f"{path} holds {rows} of {found[0].kernel} for {found[0].problem}")
    return 0


def _json(curve: Curve) -> dict[str, Any]:
    from dmuon_tune.search.replay import NEAR

    record = curve.record
    return {
        "problem": record.problem, "kernel": record.kernel, "device": record.device,
        "configurations": len(record.rows), "failures": record.failures, "best_us": record.best_us,
        "sampler": curve.sampler, f"evaluations_to_{NEAR:.0%}": curve.evaluations_to(NEAR),
        f"seconds_to_{NEAR:.0%}": curve.seconds_to(NEAR),
        "curve": [
            dict(zip(("evaluations", "median", "p10", "p90"), (mark, *curve.at(mark)), strict=True))
            for mark in range(1, curve.fractions.shape[1] + 1)
        ],
    }


def _print(curves: list[Curve]) -> None:
    from dmuon_tune.search.replay import NEAR

    rows, has_costs = [], any(curve.seconds is not None for curve in curves)
    for curve in curves:
        record, seconds = curve.record, curve.seconds_to(NEAR)
        for mark in curve.marks():
            last = mark == curve.fractions.shape[1]
            rows.append([
                record.problem, record.kernel, len(record.rows), curve.sampler, mark,
                *(f"{fraction:.3f}" for fraction in curve.at(mark)), curve.evaluations_to(NEAR) if last else None,
                *([f"{seconds:.1f}" if last and seconds is not None else None] if has_costs else []),
            ])
    headers = ["problem", "kernel", "space", "sampler", "evaluations", "median", "p10", "p90", f"to_{NEAR:.0%}"]
    say(table([*headers, *([f"s_to_{NEAR:.0%}"] if has_costs else [])], rows))
