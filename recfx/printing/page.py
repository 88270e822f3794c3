"""A page of HTML: complete, without other files, with everything escaped, and readable in any browser."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape as escape_html

from recfx.errors import printable
from recfx.printing.grid import Grid

# Everything but the page itself takes the colour of the text around it, so that it fits into a notebook of any colour.
_STYLE = """
.recfx.recfx { --line: color-mix(in srgb, currentColor 25%, transparent);
  --shade: color-mix(in srgb, currentColor 8%, var(--paper, transparent));
  --ok: color-mix(in srgb, currentColor 45%, #00a03c); --error: color-mix(in srgb, currentColor 45%, #e00000);
  --warning: color-mix(in srgb, currentColor 45%, #c88200); font: 14px/1.45 system-ui, sans-serif;
  & h1, & h2, & h3, & summary { overflow-wrap: anywhere; }
  & h2 { font-size: 1.25em; }
  & .scroll { overflow: auto; max-height: 85vh; margin: .5em 0 1.5em; container-type: inline-size; }
  & .scroll table::before { content: "more columns: scroll sideways \\2192"; display: table-caption; overflow: hidden;
    height: 1.5em; text-align: left; white-space: nowrap; width: clamp(0px, 99 * (100% - 100cqi), 100cqi);
    margin-bottom: clamp(-1.5em, 99 * (100% - 100cqi) - 1.5em, 0px); }
  & :focus-visible { outline: 2px solid currentColor; }
  & table { border-collapse: separate; border-spacing: 0; border: 0 solid var(--line); border-width: 1px 0 0 1px;
    margin: 0; font-size: inherit; table-layout: auto; }
  & th, & td { border: 0 solid var(--line); border-width: 0 1px 1px 0; padding: .2em .6em; text-align: left;
    vertical-align: top; max-width: 36em; overflow-wrap: break-word; }
  & th { background: var(--shade); white-space: nowrap; }
  & .prose { min-width: 18em; }
  @container (max-width: 40em) {
    & table:has(.prose), & table:has(.prose) :is(tbody, tr, td) { display: block; max-width: none; }
    & table:has(.prose) thead { display: none; }
    & .prose:not(:empty)::before { content: attr(data-column) ": "; font-weight: 600; }
  }
  & .number { text-align: right; white-space: nowrap; }
  & pre { background: var(--shade); overflow-x: auto; padding: .6em; }
  & details { margin: .3em 0; }
  & summary { cursor: pointer; }
  & .ok { color: var(--ok); } & .error { color: var(--error); } & .warning { color: var(--warning); }
  & tr.error, & tr.warning, & tr.ok { color: inherit; }
  & tr.error td:nth-child(-n+2) { color: var(--error); font-weight: 600; }
  & tr.warning td:nth-child(-n+2) { color: var(--warning); font-weight: 600; }
}
"""
_PROSE = ("holds for", "message", "what to do")  # columns of sentences
_PAGE_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --text: #1c1c1c; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181b; --text: #e4e4e4; } }
body { margin: 2em auto; max-width: 96em; padding: 0 1em; color: var(--text); background: var(--paper); }
.recfx th { position: sticky; top: 0; }
"""


def page(title: str, status: str, parts: Iterable[str]) -> str:
    """The whole page.

    Args:
        title: its first line, too.
        status: the class of that line: ``ok``, ``warning`` or ``error``.
        parts: what follows, in HTML.
    """
    head = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_PAGE_STYLE}</style></head><body>",
    ]
    inside = fragment([f'<h1 class="{status}">{escape(title)}</h1>', *parts])
    return "\n".join([*head, inside, "</body></html>"]) + "\n"


def fragment(parts: Iterable[str]) -> str:
    """A part of a page, as notebooks show it: parts in HTML, with their style, which is about nothing else."""
    return "\n".join([f'<div class="recfx"><style>{_STYLE}</style>', *parts, "</div>"])


def heading(text: str, status: str = "") -> str:
    """The first line of a fragment, which has no title; ``status`` as for a page."""
    return f"<p><strong{f' class={status}' if status else ''}>{escape(text)}</strong></p>"


def escape(text: str) -> str:
    """The text as it is read in the page, which can be written in any encoding of Unicode."""
    return escape_html(printable(text))


def pre(text: str) -> str:
    """Text of several lines, as it is."""
    return f'<pre tabindex="0">{escape_html(printable(text, keep=chr(10)))}</pre>'


def table(grid: Grid, classes: Iterable[str] = ()) -> list[str]:
    """A table, without its title; ``classes``: the class of each row, if they have any."""
    below = [f"<p>{escape(grid.more)}</p>"] if grid.more else []
    if not grid.rows:
        return below
    numbers = [" class=number" if column in grid.numbers else "" for column in grid.columns]
    head = (f'<th scope="col"{of}>{escape(column)}</th>' for column, of in zip(grid.columns, numbers, strict=True))
    lines = [
        # What is wider or higher than the window scrolls by itself, also with the keyboard.
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(grid.columns[0])}">'
        f"<table><thead><tr>{''.join(head)}</tr></thead><tbody>"
    ]
    prose = [f' class="prose" data-column="{column}"' if column in _PROSE else "" for column in grid.columns]
    for row, of_row in zip(grid.rows, list(classes) or [""] * len(grid.rows), strict=True):
        cells = (f"<td{words or of}>{escape(text)}</td>" for text, words, of in zip(row, prose, numbers, strict=True))
        lines.append(f"<tr{f' class={of_row}' if of_row else ''}>{''.join(cells)}</tr>")
    return ["\n".join([*lines, "</tbody></table></div>"]), *below]
