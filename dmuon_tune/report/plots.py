"""Draws the report's plots with matplotlib: speed-ups, search progress, roofline, chain costs by batch."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dmuon_tune.errors import DmuonTuneError
from dmuon_tune.recipe import pieces
from dmuon_tune.words import counted

from .data import DeviceReport, Product
from .roofline import ceilings
from .text import geometric_mean, microseconds, plain, scaled, times

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, GRID = "#1b1f24", "#c9ced6"
SERIES = ("#1f5fa8", "#c44e00", "#00795b", "#9b3d87", "#7a5c00", "#5f6670", "#b3002d", "#00707f")
LINES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (8, 3)), (0, (1, 3)), (0, (3, 1, 1, 1)))
MARKERS = "osD^vP*X"
BARS = 24  # problems in one chart
NARROW = 10  # times: a logarithmic axis of less is labelled between its powers of ten
WIDE = 8  # times: a faster winner's bar would leave no room for the others
SETTINGS: dict[str, Any] = {  # on top of matplotlib's own defaults, whatever the user's matplotlibrc says
    "svg.fonttype": "none", "text.parse_math": False, "font.size": 9.0, "figure.titlesize": 9.5, "axes.grid": True,
    "axes.axisbelow": True, "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK,
    "ytick.color": INK, "grid.color": GRID, "grid.linewidth": 0.6, "legend.frameon": False, "hatch.linewidth": 0.6,
    "legend.fontsize": 8.0, "axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True,
}


@dataclass(frozen=True)
class Plot:
    """A figure, drawn in the light theme; ``name`` may name a file, ``alt`` says in words what it shows."""

    kind: str
    name: str
    title: str
    alt: str
    figure: Figure


def require_matplotlib() -> None:
    """DmuonTuneError where matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise DmuonTuneError(
            f"the report draws with matplotlib, which does not import ({error}); pip install 'dmuon-tune[report]'"
        ) from error


@contextmanager
def _settings(**more: Any) -> Iterator[None]:
    """For drawing and for saving alike: matplotlib makes ticks when it first needs them."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**SETTINGS, **more})
        yield


def plots(report: DeviceReport, prefix: str = "") -> list[Plot]:
    """Every plot of one device that its results suffice for; ``prefix`` begins each name."""
    with _settings():
        drawn = [*_speedups(report.products), *_roofline(report), *_batch_costs(report)]
        rivals = sorted({_rival(kernel) for product in report.products for kernel, _ in product.attempts})
        drawn += [_progress(product, rivals) for product in report.products if product.attempts]
        for plot in drawn:
            plot.figure.suptitle(plain(plot.title, 72))
    taken: dict[str, int] = {}
    return [_named(plot, prefix, taken) for plot in drawn]


def to_svg(plot: Plot) -> str:
    """The figure as an SVG element for a page that defines ``--ink``, ``--grid`` and ``--s0`` ... ``--s7``."""
    buffer = io.StringIO()
    with _settings(**{"svg.hashsalt": plot.name}):  # else two figures on one page might share an id
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        plot.figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    width, height = (72 * inches for inches in plot.figure.get_size_inches())
    body = text[text.index(">", text.index("<svg")) + 1 :]
    body = re.sub(r'<g id="[^"]*"', "<g", body)  # nothing refers to them, and each figure has the same
    for color, name in ((INK, "ink"), (GRID, "grid"), *((each, f"s{index}") for index, each in enumerate(SERIES))):
        body = body.replace(color, f"var(--{name})")
    return (
        f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 {width:g} {height:g}" '
        f'style="max-width:{width * 4 / 3:.0f}px" aria-hidden="true" focusable="false">{body.strip()}'
    )


def to_png(plot: Plot) -> bytes:
    """The figure as a PNG image of 150 dots an inch on white."""
    buffer = io.BytesIO()
    with _settings():
        plot.figure.savefig(buffer, format="png", dpi=150, facecolor="white")
    return buffer.getvalue()


def _named(plot: Plot, prefix: str, taken: dict[str, int]) -> Plot:
    name = re.sub(r"[^a-z0-9]+", "-", f"{prefix} {plot.kind} {plot.name}".lower())[:100].strip("-")
    taken[name] = taken.get(name, 0) + 1
    unique = name if taken[name] == 1 else f"{name}-{taken[name]}"
    return Plot(plot.kind, unique, plot.title, plot.alt, plot.figure)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    return figure, figure.add_subplot()


def _style(index: int) -> dict[str, Any]:
    """Colour, line and marker of a series: told apart without colour too."""
    place = index % len(SERIES)
    return {"color": SERIES[place], "linestyle": LINES[place], "marker": MARKERS[(index + index // len(SERIES)) % 8]}


def _speedups(products: Sequence[Product]) -> Iterable[Plot]:
    shown = [product for product in products if product.over_library or product.over_untuned]
    sizes = pieces(len(shown), BARS) if shown else ()
    for number, size in enumerate(sizes, 1):
        part = shown[sum(sizes[: number - 1]) :][:size]
        figure, axes = _figure(7.6, 0.9 + 0.34 * len(part))
        for place, (values, label, hatch) in enumerate((
            ([product.over_library for product in part], "over the library", ""),
            ([product.over_untuned for product in part], "over its kernel untuned", "////"),
        )):
            rows = [(index + 0.2 * (2 * place - 1), value) for index, value in enumerate(values) if value]
            axes.barh(
                [row for row, _ in rows], [value for _, value in rows], 0.38, label=label, hatch=hatch,
                facecolor=SERIES[place] if not hatch else "none", edgecolor=SERIES[place],
            )
            for row, value in rows:
                axes.text(value, row, f" {value:.2f}", va="center", fontsize=7)
        axes.margins(x=0.07)
        axes.axvline(1.0, color=INK, linewidth=1)
        axes.set_yticks(range(len(part)), [plain(product.problem.label(), 60) for product in part], fontsize=8)
        axes.set_ylim(len(part) - 0.4, -0.6)
        axes.set_xlabel("winner's speed, times the baseline's")
        if max(axes.get_xlim()) > WIDE:
            axes.set_xscale("log")
            _plain_ticks(axes.xaxis, lambda speed: f"{speed:g}")
        axes.grid(False, axis="y")
        figure.legend(loc="outside lower center", ncols=2)
        mean = times(geometric_mean(product.over_library for product in part))
        title = "Winners' speed-up" + (f", part {number} of {len(sizes)}" if len(sizes) > 1 else "")
        bars = counted(len(part), "problem")
        alt = f"Bars for {bars}, {mean} the library in the geometric mean; the table has every value."
        yield Plot("speedup", str(number), title, alt, figure)


def _rival(kernel: str) -> str:
    """What tells kernels of one op apart: the name without the op."""
    return kernel.partition(".")[2] or kernel


def _progress(product: Product, rivals: Sequence[str]) -> Plot:
    """Best so far by kernel against how many configurations of the problem were measured, all kernels counted;
    ``rivals`` are those of all figures, for each to look the same in every one."""
    figure, axes = _figure(4.6, 3.3)
    steps: dict[str, list[tuple[int, float]]] = {}
    failed = [number for number, (_, outcome) in enumerate(product.attempts, 1) if not outcome.ok]
    for number, (kernel, outcome) in enumerate(product.attempts, 1):
        if outcome.median_us is not None:
            line = steps.setdefault(kernel, [])
            line.append((number, min(outcome.median_us, line[-1][1] if line else outcome.median_us)))
    count = len(product.attempts)
    for kernel, line in sorted(steps.items()):
        numbers, medians = [number for number, _ in line], [median for _, median in line]
        axes.plot(
            [*numbers, count], [*medians, medians[-1]], drawstyle="steps-post", **_style(rivals.index(_rival(kernel))),
            markersize=3.5, markevery=range(len(line)), label=f"{plain(_rival(kernel), 24)} ({len(line)})",
            linewidth=1.4,
        )
    if failed:
        axes.plot(
            failed, [0.03] * len(failed), "x", color=INK, markersize=5, transform=axes.get_xaxis_transform(),
            label=f"failed ({len(failed)})",
        )
    if steps:
        axes.set_yscale("log")
        _plain_ticks(axes.yaxis, microseconds)
    axes.set_xlim(0.5, count + 0.5)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("configurations measured")
    axes.set_ylabel("best so far, µs")
    if steps or failed:
        figure.legend(loc="outside lower center", ncols=3, columnspacing=1.2, handlelength=2.6)
    best = ", ".join(f"{kernel} {microseconds(line[-1][1])} µs" for kernel, line in sorted(steps.items()))
    title = f"{product.problem.label()} ({product.layer})"
    alt = f"{counted(count, 'configuration')} measured, {len(failed)} failed. Best by kernel: {best or 'none'}."
    return Plot("progress", title, title, alt, figure)


def _plain_ticks(axis: Any, written: Callable[[float], str]) -> None:
    """Labels of a logarithmic axis, once its limits are set."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_formatter(FuncFormatter(lambda value, _: written(value)))
    axis.set_minor_formatter(NullFormatter())
    if high / low < NARROW:
        axis.set_major_locator(MaxNLocator(7))
    elif high / low < NARROW**2:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))


def _roofline(report: DeviceReport) -> Iterable[Plot]:
    shown = [product for product in report.products if product.intensity and product.median_us]
    if not shown:
        return
    figure, axes = _figure(7.6, 4.8)
    for index, op in enumerate(sorted({product.problem.op for product in shown})):
        style = _style(index)
        ours = [product for product in shown if product.problem.op == op]
        for product in ours:
            rates = [product.rate(median_us) for median_us in (product.library_us, product.median_us) if median_us]
            axes.plot([product.intensity] * len(rates), rates, color=style["color"], linewidth=0.8)
        library = [(product.intensity, rate) for product in ours if (rate := product.rate(product.library_us))]
        for points, fill, label in (
            ([(product.intensity, product.rate(product.median_us)) for product in ours], style["color"], "winner"),
            (library, "none", "library"),
        ):
            axes.plot(
                [x for x, _ in points], [y for _, y in points], **{**style, "linestyle": "none"},
                markerfacecolor=fill, markersize=6, label=f"{plain(op, 24)}, {label}",
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    _ceilings(axes, report)
    axes.set_xlabel("arithmetic intensity, FLOPs a byte (symmetric products counted once)")
    axes.set_ylabel("FLOP/s")
    figure.legend(loc="outside lower center", ncols=4)
    fastest = max(product.rate(product.median_us) or 0.0 for product in shown)
    alt = f"FLOP/s against arithmetic intensity of {len(shown)} winners, the fastest at {scaled(fastest, 'FLOP/s')}; "
    yield Plot("roofline", "", "Roofline", alt + "the winners' table has every value.", figure)


def _ceilings(axes: Any, report: DeviceReport) -> None:
    limits = ceilings(report)
    low, high = axes.get_xlim()
    lines = [*limits.compute, *([limits.peak] if limits.peak else [])]
    for index, ceiling in enumerate(lines):
        axes.axhline(ceiling.value, color=INK, linewidth=1, linestyle=LINES[index % len(LINES)])
        axes.annotate(
            f"{ceiling.name}: {scaled(ceiling.value, 'FLOP/s')}", (low, ceiling.value), xytext=(3, 3),
            textcoords="offset points", fontsize=8,
        )
    if limits.memory:
        bottom, top = axes.get_ylim()
        axes.plot([low, high], [low * limits.memory.value, high * limits.memory.value], color=INK, linewidth=1)
        axes.set_ylim(bottom, top * 1.5)
        axes.set_xlim(low, high)
        axes.annotate(
            f"slope: {limits.memory.name}, {scaled(limits.memory.value, 'B/s')}", (0.98, 0.03), fontsize=8, ha="right",
            xycoords="axes fraction",
        )
    _plain_ticks(axes.yaxis, lambda rate: scaled(rate, "FLOP/s"))
    _plain_ticks(axes.xaxis, lambda intensity: f"{intensity:g}")


def _batch_costs(report: DeviceReport) -> Iterable[Plot]:
    priced = [kept for kept in report.recipes if kept.recipe.batch_costs and kept.recipe.cost_us]
    if not priced:
        return
    figure, axes = _figure(7.6, 3.8)
    for index, kept in enumerate(priced):
        recipe = kept.recipe
        points = [*recipe.batch_costs, (recipe.group.batch, recipe.cost_us or 0.0)]
        axes.plot(
            [batch for batch, _ in points], [cost_us / batch for batch, cost_us in points], **_style(index),
            markersize=4, label=f"{recipe.group.rows}×{recipe.group.cols} {plain(recipe.form, 12)}",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _plain_ticks(axes.yaxis, microseconds)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("matrices in the batch")
    axes.set_ylabel("µs a matrix, whole chain")
    figure.legend(loc="outside right upper")
    lines = counted(len(priced), "recipe")
    alt = f"Microseconds a matrix against the batch size of {lines}; the recipes' table has every value."
    yield Plot("batch-cost", "", "Cost a matrix by batch size", alt, figure)
