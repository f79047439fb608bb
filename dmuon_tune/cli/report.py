"""``dmuon-tune report``: what was tuned, as one HTML file that works offline, and its plots as PNG images."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import caches, options, workload
from .output import print_json, say, warn, write_file

if TYPE_CHECKING:
    from dmuon_tune.report import Plot


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "report", parents=[options.common(), options.model(), options.cache()], help="write an HTML report",
        description="Write what the caches hold as one self-contained HTML file: winners, whole chains, roofline, "
        "search progress, failures and what to do next. With one of --preset, --model or --shapes it also says which "
        "of those matrices are not tuned.",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index> (default: auto)")
    parser.add_argument("--all-devices", action="store_true", help="results of every device, not only of this one")
    parser.add_argument(
        "--out", type=options.place, metavar="FILE", default="report.html", help="the file (default: report.html)"
    )
    parser.add_argument("--png", type=options.place, metavar="FOLDER", help="also write each plot there as a PNG image")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    asked = any(getattr(args, name) is not None for name in ("preset", "model", "shapes"))
    groups = workload.of(args).groups if asked else ()
    from dmuon_tune import report

    report.require_matplotlib()
    device = None
    if not args.all_devices:
        from dmuon_tune.backends.probe import fingerprint

        device = fingerprint(args.device)
    layers = caches.described(args.cache)
    with caches.opened(layers) as opened:
        contents = [report.read(cache.label, cache.path, cache.store) for cache in opened]
    views = report.collect(contents, device, groups)
    if all(view.is_empty for view in views) and not caches.exit_code(layers):  # else nobody knows what is tuned
        _say_nothing_is_tuned([each.name for each in report.devices(contents)])
    prefixes = [f"{index} {view.device.arch}" if len(views) > 1 else "" for index, view in enumerate(views, 1)]
    drawn = [(view, report.plots(view, prefix)) for view, prefix in zip(views, prefixes, strict=True)]
    made_at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    page = report.html(drawn, layers, made_at, layers[0]["path"] if args.cache else "")
    images = _write_images(Path(args.png), [plot for _, plots in drawn for plot in plots]) if args.png else []
    write_file(Path(args.out), page.encode())
    if args.format == "json":
        print_json({"report": args.out, "png": images})
    else:
        say("\n".join([args.out, *images]))
    return caches.exit_code(layers)


def _say_nothing_is_tuned(others: list[str]) -> None:
    if others:
        warn(f"nothing is tuned for this device; --all-devices reports on {', '.join(others)}")
    else:
        warn("nothing is tuned yet; run 'dmuon-tune tune' with --preset, --model or --shapes")


def _write_images(folder: Path, plots: list[Plot]) -> list[str]:
    from dmuon_tune.report import to_png

    paths = [folder / f"{plot.name}.png" for plot in plots]
    for plot, path in zip(plots, paths, strict=True):
        write_file(path, to_png(plot))
    return [str(path) for path in paths]
