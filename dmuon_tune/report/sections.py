"""The report's sections of one device, in the order in which they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dmuon_tune.cache import ChainTrial
from dmuon_tune.measurement import STATUSES, Measurement
from dmuon_tune.words import counted

from .advice import advice
from .data import DeviceReport, KeptRecipe, Product
from .markup import Markup, code, details, element, facts, figure, joined, log, table
from .plots import Plot
from .roofline import Ceilings, ceilings, clock_range_mhz
from .text import (
    binary_bytes,
    config_text,
    geometric_mean,
    microseconds,
    pieces_text,
    scaled,
    times,
)

MOST_LOGS = 20  # failures whose log is on the page; 'dmuon-tune show --failures --format json' has all


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    body: Markup


Drawn = Mapping[str, Sequence[Markup]]  # a plot's kind → its figures


def of(report: DeviceReport, drawn: Drawn, cache_path: str = "") -> list[Section]:
    """Every section, those without results too: they say so."""
    return [
        Section("summary", "Summary", _summary(report)),
        Section("next", "What to do next", next_steps(report, cache_path)),
        Section("device", "Device and toolchains", _device(report)),
        Section("winners", "Winners", _winners(report, drawn)),
        Section("chains", "Whole chains", _chains(report, drawn)),
        Section("roofline", "Roofline", _roofline(report, drawn)),
        Section("progress", "Search progress", _progress(report, drawn)),
        Section("failures", "Outcomes and failures", _outcomes(report)),
    ]


def drawing(plot: Plot, svg: Markup) -> Markup:
    return figure(svg, f"{plot.title}. {plot.alt}", plot.alt)


def _summary(report: DeviceReport) -> Markup:
    won = [product for product in report.products if product.winner is not None]
    if report.is_empty:
        return element("p", f"The caches hold no result of {report.device.name}.")
    total = sum((counts for counts in report.statuses.values()), Counter[str]())
    stale = sum(bool(product.winner and product.winner.stale) for product in won)
    timed = [kept for kept in report.recipes if kept.recipe.timed]
    return facts([
        ("device", report.device.name),
        ("problems with a winner", f"{len(won)} of {len(report.products)}"),
        ("over the library, geometric mean", times(geometric_mean(product.over_library for product in won))),
        ("over the kernels untuned, geometric mean", times(geometric_mean(product.over_untuned for product in won))),
        ("recipes, of these timed as chains", f"{len(report.recipes)}, {len(timed)}"),
        ("configurations and chains tried", f"{sum(total.values()):,}"),
        ("of these failed", f"{sum(total.values()) - total['ok']:,}"),
        ("stale winners", f"{stale}"),
        ("disturbed winners", f"{sum(bool(product.best and product.best.disturbed) for product in won)}"),
    ])


def next_steps(report: DeviceReport, cache_path: str = "") -> Markup:
    """What to do, with commands; ``cache_path`` is the cache named on the command line, else empty."""
    found = advice(report, cache_path)
    if not found:
        return element("p", "Nothing: every problem that the caches know has a current, undisturbed winner.")
    items = (
        element("li", joined(
            element("strong", each.finding), element("span", each.meaning),
            Markup(f"<br>{code(each.command)}") if each.command else Markup(""),
        ))
        for each in found
    )
    return Markup('<ol class="next">' + "\n".join(items) + "</ol>")


def _device(report: DeviceReport) -> Markup:
    device = report.device
    parts = [facts([
        ("name", device.name), ("architecture", device.arch),
        ("multiprocessors" if device.kind == "cuda" else "cores", device.sm_count),
        *([("shared memory a block", binary_bytes(device.smem_per_block_bytes))] if device.kind == "cuda" else []),
        ("last-level cache", binary_bytes(device.l2_bytes)),
        *([("memory", binary_bytes(device.memory_bytes))] if device.memory_bytes else []),
    ])]
    tools = Counter(trial.key.toolchain for _, trial in report.trials)
    parts.append(table(
        "Toolchains that the results were made with", ["backend", "versions", "configurations"],
        [[tool.backend, tool.label(), f"{count:,}"] for tool, count in sorted(tools.items(), key=lambda each: (
            each[0].backend, each[0].versions
        ))],
        numeric=("configurations",),
    ))
    origins: dict[str, set[str]] = {}
    for entry in report.entries:
        for name in ("tool", "torch", "driver", "device"):
            if entry.provenance.get(name):
                origins.setdefault(name, set()).add(str(entry.provenance[name]))
    rows = [[name, ", ".join(sorted(values))] for name, values in origins.items()]
    dates = sorted(trial.created_at for _, trial in report.trials)
    rows += [["measured", f"{dates[0][:16]} to {dates[-1][:16]} UTC"]] if dates else []
    clocks_mhz = clock_range_mhz(report)
    if clocks_mhz:
        rows.append(["SM clock while timing", f"{clocks_mhz[0]:,} to {clocks_mhz[1]:,} MHz"])
        rows.append(["clock held down by", ", ".join(_throttles(report)) or "nothing"])
    parts.append(table("Where and when the winners were measured", ["what", "value"], rows))
    return joined(*parts)


def _throttles(report: DeviceReport) -> list[str]:
    clocks = (trial.measurement.resources.get("clock") for _, trial in report.trials)
    return sorted({str(reason) for clock in clocks if isinstance(clock, dict) for reason in clock.get("throttle", ())})


def _state(product: Product) -> str:
    if product.winner is None or product.best is None:
        return "all failed"
    return ", ".join(["stale" if product.winner.stale else "current", *_disturbances(product.best)])


def _disturbances(measurement: Measurement) -> list[str]:
    moved = ["clock moved"] if measurement.resources.get("clock_moved") else []
    return [*(["disturbed"] if measurement.disturbed else []), *moved]


def _winners(report: DeviceReport, drawn: Drawn) -> Markup:
    if not report.products:
        return element("p", "Nothing is tuned.")
    headers = [
        "problem", "kernel", "median µs", "p20–p80 µs", "library µs", "over library", "untuned µs", "over untuned",
        "rate", "FLOP/B", "state", "decided by", "layer",
    ]
    rows = [
        [
            product.problem.label(), product.winner and product.winner.entry.key.kernel,
            microseconds(product.median_us), _spread(product.best), microseconds(product.library_us),
            times(product.over_library), microseconds(product.untuned_us), times(product.over_untuned),
            scaled(product.rate(product.median_us), "FLOP/s"),
            None if product.intensity is None else f"{product.intensity:,.1f}",
            _state(product), product.best and ("race" if product.best.place is not None else "screening"),
            product.layer,
        ]
        for product in report.products
    ]
    return joined(
        element(
            "p", "The library is the vendor's (cuBLAS, or the CPU's BLAS), itself a candidate. Untuned is the winner's "
            "own kernel as it runs without tuning. Rates count a symmetric product's FLOPs once.",
        ),
        *drawn.get("speedup", ()),
        table("Each problem's winner", headers, rows, numeric=headers[2:10]),
        _configurations(report),
    )


def _configurations(report: DeviceReport) -> Markup:
    won = [(product, product.winner) for product in report.products if product.winner is not None]
    rows = [
        [
            product.problem.label(), winner.entry.key.kernel, product.layer,
            code(config_text(winner.entry.config)) if winner.entry.config else None, winner.stale,
        ]
        for product, winner in won
    ]
    summary = f"The winners' configurations, and why {sum(bool(winner.stale) for _, winner in won)} of them are stale"
    headers = ["problem", "kernel", "layer", "configuration", "why stale"]
    return details(summary, table("Winners' configurations", headers, rows))


def _spread(measurement: Measurement | None) -> str | None:
    if measurement is None:
        return None
    return f"{microseconds(measurement.p20_us)}–{microseconds(measurement.p80_us)}"


def _chains(report: DeviceReport, drawn: Drawn) -> Markup:
    if not report.recipes and not report.chains:
        return element("p", "No chain was timed and no recipe is kept.")
    headers = [
        "group", "form", "pieces", "dtype", "steps", "restarts", "cost µs", "p20–p80 µs", "rate", "cost is of",
        "kernels", "µs by batch", "layer", "state",
    ]
    return joined(
        element("p", "A recipe says how a group of equal matrices is orthogonalized; its cost is the whole batch's."),
        table("Recipes", headers, [_recipe(kept) for kept in report.recipes], numeric=("steps", *headers[6:9]))
        if report.recipes else element("p", "No recipe is kept yet: a tuning run writes them at its end."),
        *drawn.get("batch-cost", ()),
        details(f"Every chain that was tried ({len(report.chains):,})", table(
            "Chains in the order in which they were tried",
            ["group", "form", "pieces", "dtype", "median µs", "p20–p80 µs", "polar error", "outcome", "kernels"],
            [_chain(chain) for _, chain in report.chains], numeric=("median µs", "p20–p80 µs", "polar error"),
        )),
    )


def _recipe(kept: KeptRecipe) -> list[object]:
    recipe = kept.recipe
    restarts = ", ".join(map(str, recipe.restarts)) if recipe.form != "plain" else ""
    spread = f"{microseconds(recipe.p20_us)}–{microseconds(recipe.p80_us)}" if recipe.timed else None
    origin = None if recipe.cost_us is None else "timed chain" if recipe.timed else "sum of products"
    costs = "; ".join(f"{batch}: {microseconds(cost_us)}" for batch, cost_us in recipe.batch_costs)
    return [
        recipe.group.label(), recipe.form, pieces_text(recipe), recipe.dtype, recipe.steps, restarts,
        microseconds(recipe.cost_us), spread, scaled(kept.rate, "FLOP/s"), origin, _kernels(recipe.picks), costs,
        kept.layer, f"stale: {', '.join(kept.stale)}" if kept.stale else "current",
    ]


def _kernels(picks: Sequence[object]) -> str:
    return ", ".join(dict.fromkeys(str(getattr(pick, "kernel", "")) for pick in picks))


def _chain(chain: ChainTrial) -> list[object]:
    measurement, recipe = chain.measurement, chain.recipe
    outcome = ", ".join([measurement.status, *_disturbances(measurement)])
    return [
        recipe.group.label(), recipe.form, pieces_text(recipe), recipe.dtype, microseconds(measurement.median_us),
        _spread(measurement) if measurement.ok else None,
        None if measurement.max_rel_err is None else f"{measurement.max_rel_err:.3g}", outcome, _kernels(recipe.picks),
    ]


def _roofline(report: DeviceReport, drawn: Drawn) -> Markup:
    if not drawn.get("roofline"):
        return element("p", "No result to draw.")
    limits = ceilings(report)
    rows = [[each.name, scaled(each.value, "FLOP/s"), each.by] for each in limits.compute]
    rows += [[each.name, scaled(each.value, "B/s"), each.by] for each in [limits.memory] if each]
    rows += [[each.name, scaled(each.value, "FLOP/s"), each.by] for each in [limits.peak] if each]
    return joined(
        element("p", _about(limits)), *drawn["roofline"],
        table("Ceilings", ["ceiling", "value", "reached by, or from"], rows, numeric=("value",)),
    )


def _about(limits: Ceilings) -> str:
    measured = (
        "Filled marks are winners, hollow ones the library on the same problem. FLOPs and bytes are the op's: a "
        "symmetric product counts once, every operand moves once. "
    )
    if limits.peak is None:
        return measured + (
            "No peak of this device is known here, for its architecture's rate or its clock was not recorded: both "
            "ceilings are what the best of these results reached, so the hardware's may be higher."
        )
    return measured + (
        "The bandwidth and each dtype's ceiling are what the best of these results reached; the peak follows from the "
        "architecture and the highest clock recorded. The memory's own peak is not known here."
    )


def _progress(report: DeviceReport, drawn: Drawn) -> Markup:
    if not drawn.get("progress"):
        return element("p", "Nothing was tried.")
    return joined(
        element(
            "p", "Each kernel's fastest median so far against how many configurations of the problem had been "
            "measured, all its kernels counted, in the order of their first recording. A cross is one that failed.",
        ),
        Markup('<div class="plots">' + "\n".join(drawn["progress"]) + "</div>"),
    )


def _outcomes(report: DeviceReport) -> Markup:
    statuses = [status for status in STATUSES if any(counts[status] for counts in report.statuses.values())]
    if not statuses:
        return element("p", "Nothing was tried.")
    rows = [[kernel, *(f"{counts[status]:,}" for status in statuses)] for kernel, counts in report.statuses.items()]
    totals = ["all", *(f"{sum(counts[status] for counts in report.statuses.values()):,}" for status in statuses)]
    parts = [table("How trials ended", ["kernel", *statuses], [*rows, totals], numeric=statuses)]
    failures = _failures(report)
    if not failures:
        return joined(*parts, element("p", "No configuration and no chain failed."))
    parts.append(table(
        f"Failures: {counted(len(failures), 'kind')}", ["kernel", "status", "how often", "reason", "for example"],
        [[kernel, status, f"{count:,}", reason, example] for kernel, status, reason, count, example, _ in failures],
        numeric=("how often",),
    ))
    parts += [
        details(f"Log of {kernel}, {status}", log(text))
        for kernel, status, _, _, _, text in failures[:MOST_LOGS]
        if text
    ]
    return joined(*parts)


def _failures(report: DeviceReport) -> list[tuple[str, str, str, int, str, str]]:
    """(kernel, status, reason, how often, an example, its log), the most frequent first."""
    found: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    every = [
        (trial.key.kernel, trial.measurement, f"{trial.key.problem.label()}: {config_text(trial.config)}")
        for _, trial in report.trials
    ]
    every += [
        (f"chain {chain.recipe.form}", chain.measurement, chain.recipe.group.label()) for _, chain in report.chains
    ]
    for kernel, measurement, example in every:
        if not measurement.ok:
            kind = kernel, measurement.status, measurement.reason or "no reason was recorded"
            found.setdefault(kind, []).append((example, measurement.log))
    ordered = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    return [(*kind, len(cases), *cases[0]) for kind, cases in ordered]
