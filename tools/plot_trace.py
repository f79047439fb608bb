"""Draws a GPU's part of a trace that bench_train --trace has kept: computation, and what is carried beside it.

    python tools/plot_trace.py traces/qwen2.5-1.5b-dedicated-0.json --out timeline.svg --from 790 --to 850

--from and --to are milliseconds since the trace's first kernel. What lies closer than a pixel is drawn as one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from _bench_trace import Span, joined, lanes
from _runner import Parser, check_writable, run

from dmuon_tune.errors import UsageError
from dmuon_tune.report import require_matplotlib
from dmuon_tune.report.plots import INK, SERIES, SETTINGS

PIXELS = 1600.0


def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="plot_trace", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=".svg or .png")
    parser.add_argument("--from", dest="begin_ms", type=float, default=0.0, metavar="MS", help="default: 0")
    parser.add_argument("--to", dest="end_ms", type=float, metavar="MS", help="default: the end")
    options = parser.parse_args(arguments)
    check_writable("--out", options.out)
    require_matplotlib()
    try:
        found = lanes(json.loads(options.trace.read_text())["traceEvents"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{options.trace}: no trace of bench_train: {error}") from None
    spans = [span for some in found.values() for span in some]
    if not spans:
        raise UsageError(f"{options.trace}: no GPU's kernels in it; run bench_train --trace on a GPU")
    first = min(begin for begin, _ in spans)
    end_ms = options.end_ms if options.end_ms is not None else (max(end for _, end in spans) - first) / 1e3
    draw({name: cut(some, first, options.begin_ms, end_ms) for name, some in found.items()}, options.out)
    return 0


def cut(spans: Sequence[Span], first_us: float, begin_ms: float, end_ms: float) -> list[Span]:
    """What lies between two times, in milliseconds since ``first_us``, gaps of less than a pixel filled."""
    gap = (end_ms - begin_ms) / PIXELS
    shown = [((begin - first_us) / 1e3, (end - first_us) / 1e3) for begin, end in spans]
    within = [(max(begin, begin_ms), min(end, end_ms)) for begin, end in shown if end > begin_ms and begin < end_ms]
    return joined((begin, max(end, begin + gap)) for begin, end in within)


def draw(shown: Mapping[str, Sequence[Span]], path: Path) -> None:
    """A bar a lane, milliseconds from left to right."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcParams.update(SETTINGS)
        figure = Figure(figsize=(10, 0.6 + 0.35 * len(shown)))
        axes = figure.add_subplot()
        for row, spans in enumerate(shown.values()):
            axes.broken_barh([(begin, end - begin) for begin, end in spans], (row - 0.4, 0.8), color=SERIES[row])
        axes.set_yticks(range(len(shown)), list(shown), color=INK)
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        figure.savefig(path)


if __name__ == "__main__":
    sys.exit(run("plot_trace", main))
