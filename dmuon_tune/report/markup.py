"""Writes HTML: everything is escaped unless it is markup that this package made."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .text import plain

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --soft: #f3f5f8; --grid: #c9ced6; --link: #1f5fa8;
  --s0: #1f5fa8; --s1: #c44e00; --s2: #00795b; --s3: #9b3d87; --s4: #7a5c00; --s5: #5f6670; --s6: #b3002d;
  --s7: #00707f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --paper: #14171c; --soft: #1f242c; --grid: #444c58;
  --link: #8ab8f2; --s0: #7db3f0; --s1: #ff9a5c; --s2: #4fd1a5; --s3: #e29bd2; --s4: #e0c15a; --s5: #b4bcc8;
  --s6: #ff8095; --s7: #5cd3e0; } }
body { margin: 0 auto; padding: 1rem 1.25rem 4rem; max-width: 96rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
a { color: var(--link); }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1rem; padding: 0; list-style: none; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--grid); }
.device { margin-top: 3.5rem; font-size: 1.6rem; border: 0; }
dl.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: .75rem; margin: 1rem 0; }
dl.facts div { background: var(--soft); padding: .6rem .8rem; border-radius: .3rem; }
dl.facts dt { font-size: .85rem; }
dl.facts dd { margin: 0; font-size: 1.35rem; font-weight: 600; overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: .4rem; }
th, td { text-align: left; vertical-align: top; padding: .2rem .7rem .2rem 0; border-bottom: 1px solid var(--grid); }
th { white-space: nowrap; }
tbody th { font-weight: normal; }
td.number, th.number { text-align: right; }
td { white-space: nowrap; }
td.long { min-width: 30rem; white-space: normal; overflow-wrap: anywhere; }
figure { margin: 1rem 0; }
p, figcaption, li { max-width: 76rem; }
figcaption { font-size: .875rem; }
figure svg { width: 100%; height: auto; display: block; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(26rem, 100%), 1fr)); gap: .5rem 1.5rem; }
code, pre { font-size: .85rem; background: var(--soft); overflow-wrap: anywhere; white-space: pre-wrap; }
pre { padding: .6rem; max-height: 20rem; overflow: auto; }
ol.next li { margin-bottom: 1rem; }
:focus-visible { outline: 2px solid var(--link); }
"""

LONG = 32  # characters of a cell that needs room, or its row gets high


class Markup(str):
    """Text that is HTML already."""


def text(value: object) -> Markup:
    """Escaped for an element or a quoted attribute, in one line; markup stays as it is."""
    return value if isinstance(value, Markup) else Markup(escape(plain(str(value), longest=0)))


def joined(*parts: str) -> Markup:
    return Markup("\n".join(parts))


def element(tag: str, value: object, **attributes: str) -> Markup:
    """``<tag ...>value</tag>``; an empty attribute is left out, a trailing underscore of its name falls off."""
    named = ((name.rstrip("_").replace("_", "-"), each) for name, each in attributes.items() if each)
    given = "".join(f' {name}="{escape(each)}"' for name, each in named)
    return Markup(f"<{tag}{given}>{text(value)}</{tag}>")


def code(value: str) -> Markup:
    """A command or configuration."""
    return Markup(f"<code>{text(value)}</code>")


def facts(pairs: Sequence[tuple[str, object]]) -> Markup:
    """Terms with their values, as cards."""
    rows = (f"<div>{element('dt', name)}{element('dd', value)}</div>" for name, value in pairs)
    return Markup('<dl class="facts">' + "".join(rows) + "</dl>")


def table(
    caption: str, headers: Sequence[str], rows: Sequence[Sequence[object]], numeric: Sequence[str] = ()
) -> Markup:
    """The first column names its row; columns whose header is in ``numeric`` stand to the right."""
    kinds = ["number" if header in numeric else "" for header in headers]

    def cells(row: Sequence[object]) -> str:
        first, *rest = (text(value) if value not in (None, "") else Markup("–") for value in row)
        others = "".join(
            element("td", value, class_=kind or ("long" if len(value) > LONG else ""))
            for value, kind in zip(rest, kinds[1:], strict=True)
        )
        return f"<tr>{element('th', first, scope='row')}{others}</tr>"

    head = "".join(
        element("th", header, scope="col", class_=kind) for header, kind in zip(headers, kinds, strict=True)
    )
    body = "\n".join(map(cells, rows))
    return Markup(
        f'<div class="wide" role="region" tabindex="0" aria-label="{text(caption)}"><table><caption>{text(caption)}'
        f"</caption><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def details(summary: str, body: Markup) -> Markup:
    """Folded away until the reader opens it."""
    return Markup(f"<details><summary>{text(summary)}</summary>{body}</details>")


def log(value: str, longest: int = 4000) -> Markup:
    """A log's last characters, line by line."""
    clean = "".join(each if each.isprintable() or each == "\n" else " " for each in value[-longest:])
    return Markup(f"<pre>{escape(clean)}</pre>")


def figure(svg: str, alt: str, caption: str) -> Markup:
    """A drawing with its description for those who do not see it."""
    return Markup(
        f'<figure><div role="img" aria-label="{text(alt)}">{svg}</div>'
        f"{element('figcaption', caption)}</figure>"
    )
