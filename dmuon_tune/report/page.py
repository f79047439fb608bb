"""Puts the report's page together: one HTML file that asks for nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dmuon_tune import __version__

from . import sections
from .data import DeviceReport
from .markup import STYLE, Markup, element, joined, table
from .plots import Plot, to_svg

POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # a browser refuses whatever the page might still ask for


def html(
    reports: Sequence[tuple[DeviceReport, Sequence[Plot]]], layers: Sequence[dict[str, Any]], made_at: str,
    cache_path: str = "",
) -> str:
    """The whole page: of each device its report and plots, of the caches their ``label``, ``path``, ``state``,
    ``entries`` and ``detail``; ``made_at`` is said as it is, ``cache_path`` as in :func:`sections.next_steps`."""
    many = len(reports) > 1
    parts, links = [], []
    for number, (report, plots) in enumerate(reports, 1):
        suffix = f"-{number}" if many else ""
        if many:
            parts.append(element("h2", report.device.name, class_="device"))
            links.append(element("li", element("strong", report.device.name)))
        drawn: dict[str, list[Markup]] = {}
        for plot in plots:
            drawn.setdefault(plot.kind, []).append(sections.drawing(plot, Markup(to_svg(plot))))
        for section in sections.of(report, drawn, cache_path):
            name = section.name + suffix
            title = element("h3" if many else "h2", section.title, id=f"{name}-title")
            parts.append(Markup(
                f'<section id="{name}" aria-labelledby="{name}-title">{title}\n{section.body}</section>'
            ))
            links.append(element("li", element("a", section.title, href=f"#{name}")))
    if not reports:
        parts.append(element("p", "The caches hold no result of any device."))
    caches = table(
        "Caches, in the order of precedence", ["layer", "state", "winners", "path", "problem"],
        [[each["label"], each["state"], each["entries"], each["path"], each["detail"]] for each in layers],
        numeric=("winners",),
    )
    links.append(element("li", element("a", "Caches", href="#caches")))
    body = joined(
        element("h1", "dmuon-tune report"),
        element("p", f"Made {made_at} by dmuon-tune {__version__}. Times are microseconds, medians of their windows."),
        Markup('<nav aria-label="Sections"><ul>' + "".join(links) + "</ul></nav>"),
        *parts,
        Markup('<section id="caches" aria-labelledby="caches-title">'),
        element("h2", "Caches", id="caches-title"),
        caches,
        Markup("</section>"),
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>dmuon-tune report</title>\n<style>{STYLE}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )
