"""The report in a real browser without a network: nothing requested, nothing on the console, all of it to be seen.

Skipped where no Chromium is installed: the page's content is then tested, its rendering is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import browser
from .browser import Browser
from .conftest import Filled

SECTIONS = ("summary", "next", "device", "winners", "chains", "roofline", "progress", "failures", "caches")
VISIBLE = """
Object.fromEntries([...document.querySelectorAll(%r)].map((each, index) => {
  const box = each.getBoundingClientRect(), style = getComputedStyle(each);
  return [each.id || index, [box.width, box.height, style.visibility, style.color, style.opacity]];
}))
"""
LUMINANCE = """
(() => { const of = color => { const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map(each => {
    const share = each / 255; return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const probe = document.createElement('i'); document.body.append(probe);
  const named = name => { probe.style.color = `var(--${name})`; return of(getComputedStyle(probe).color); };
  const found = Object.fromEntries(['paper', 'ink', 'link', 's0', 's1', 's2', 's3', 's4', 's5', 's6', 's7'].map(
    name => [name, named(name)]));
  probe.remove(); return found; })()
"""


@pytest.fixture(scope="module")
def opened(filled: Filled, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser that shows the report."""
    executable = browser.find()
    if executable is None:
        pytest.skip("no Chromium here, so the page is not rendered; install one, such as apt-get install chromium")
    page = tmp_path_factory.mktemp("page") / "report.html"
    page.write_text(filled.page, "utf-8")
    with Browser(executable, tmp_path_factory.mktemp("profile")) as tab:
        tab.ask("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
        tab.ask("Emulation.setDeviceMetricsOverride", width=1200, height=900, deviceScaleFactor=1, mobile=False)
        tab.open(page)
        yield tab


def test_it_asks_for_nothing_and_says_nothing_on_the_console(opened: Browser) -> None:
    requested = [event["request"]["url"] for method, event in opened.events if method == "Network.requestWillBeSent"]
    assert [Path(url).name for url in requested] == ["report.html"] and requested[0].startswith("file://")
    told = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed")
    assert [event for event in opened.events if event[0] in told] == []


def test_a_request_or_a_console_message_would_be_noticed(opened: Browser, filled: Filled, tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text("<script>console.error('seen')</script><img src='http://example.com/a.png'>")
    before, page = len(opened.events), opened.evaluate("location.href")
    opened.open(tmp_path / "bad.html")
    methods = [method for method, _ in opened.events[before:]]
    assert methods.count("Network.requestWillBeSent") == 2
    assert "Runtime.consoleAPICalled" in methods and "Network.loadingFailed" in methods
    opened.open(Path(page.removeprefix("file://")))


def test_every_section_and_plot_is_to_be_seen(opened: Browser) -> None:
    sections: dict[str, Any] = opened.evaluate(VISIBLE % "section")
    plots: dict[str, Any] = opened.evaluate(VISIBLE % "figure svg")
    assert tuple(sections) == SECTIONS and len(plots) == 6
    for width, height, visibility, _, opacity in [*sections.values(), *plots.values()]:
        assert width > 200 and height > 50 and visibility == "visible" and opacity == "1"
    texts = opened.evaluate("[...document.querySelectorAll('svg text')].map(each => each.textContent).join(' ')")
    assert "over the library" in texts and "best float32 result" in texts and "configurations measured" in texts


@pytest.mark.parametrize("width", [1200, 360])
def test_nothing_sticks_out_of_the_page(opened: Browser, width: int) -> None:
    opened.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    assert opened.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_series_stand_out_in_light_and_dark(opened: Browser, scheme: str) -> None:
    opened.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    luminance: dict[str, float] = opened.evaluate(LUMINANCE)
    paper = luminance.pop("paper")
    assert (paper > 0.5) == (scheme == "light")
    for name, value in luminance.items():
        high, low = max(paper, value), min(paper, value)
        contrast = (high + 0.05) / (low + 0.05)
        assert contrast >= (4.5 if name in ("ink", "link") else 3.0), f"{name}: {contrast:.2f}"  # WCAG 2.2, AA
    used = opened.evaluate("getComputedStyle(document.querySelector('svg text')).fill")
    ink = opened.evaluate("getComputedStyle(document.body).color")
    assert used == ink
