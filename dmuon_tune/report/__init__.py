"""The report of a tuning: what the caches hold as one HTML page that works offline, its plots by matplotlib."""

from __future__ import annotations

from .data import Contents, DeviceReport, collect, devices, read
from .loads import owners_plot
from .page import html
from .plots import Plot, plots, require_matplotlib, to_png

__all__ = [
    "Contents", "DeviceReport", "Plot", "collect", "devices", "html", "owners_plot", "plots", "read",
    "require_matplotlib", "to_png",
]
