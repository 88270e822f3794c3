"""A page of HTML: complete, without other files, with everything escaped, and readable in any browser."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from html import escape as escape_html
from importlib.resources import files
from urllib.parse import urlencode

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
.recfx tr.named td { background: color-mix(in srgb, var(--text) 15%, var(--paper)); }
.filter { position: sticky; top: 0; z-index: 1; margin: 0; padding: .4em 0; background: var(--paper); }
.filter input { font: inherit; width: 24em; max-width: 60%; }
th button { all: unset; cursor: pointer; }
th button:focus-visible { outline: 2px solid; }
th[aria-sort="ascending"] button::after { content: " \\25B2"; }
th[aria-sort="descending"] button::after { content: " \\25BC"; }
"""


def page(title: str, status: str, parts: Iterable[str], *, has_filter: bool = False) -> str:
    """The whole page.

    Args:
        title: its first line, too.
        status: the class of that line: ``ok``, ``warning`` or ``error``.
        parts: what follows, in HTML.
        has_filter: whether rows can be filtered and sorted, and links lead to them; the page then has a script.
    """
    head = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_PAGE_STYLE}</style></head><body>",
    ]
    inside = fragment([f'<h1 class="{status}">{escape(title)}</h1>', *parts])
    script = [f"<script>{_script()}</script>"] if has_filter else []
    return "\n".join([*head, inside, *script, "</body></html>"]) + "\n"


@functools.cache
def _script() -> str:
    return files(__package__).joinpath("page.js").read_bytes().decode()


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


def table(grid: Grid, classes: Iterable[str] = (), names: Iterable[str] = (), linked: str = "") -> list[str]:
    """A table, without its title.

    Args:
        grid: what is in it.
        classes: the class of each row, if they have any.
        names: what each row is called in links, after the name of the first column, such as ``node=ebc_lookup``.
        linked: another page, which has the same names: the first cell of each row is a link to its place there.
    """
    kind = grid.columns[0] if grid.columns else ""
    of_rows = list(classes) or [""] * len(grid.rows)
    of_links: list[str | None] = [*names] or [None] * len(grid.rows)
    used: set[str | None] = {None}
    lines = []
    for row, of_row, name in zip(grid.rows, of_rows, of_links, strict=True):
        cells = [_cell(column, text, column in grid.numbers) for column, text in zip(grid.columns, row, strict=True)]
        if linked and name is not None:
            address = f"{linked}#{urlencode({kind: name}, errors='replace')}"
            cells[0] = f'<td><a href="{escape(address)}">{escape(row[0])}</a></td>'
        named = "" if name in used else f' id="{escape(f"{kind}={name}")}"'  # links lead to the first of a name
        used.add(name)
        lines.append(f"<tr{f' class={of_row}' if of_row else ''}{named}>{''.join(cells)}</tr>")
    below = [f"<p>{escape(grid.more)}</p>"] if grid.more else []
    return [_frame(grid, lines), *below] if lines else below


def _cell(column: str, text: str, number: bool) -> str:
    if column in _PROSE:
        return f'<td class="prose" data-column="{column}">{escape(text)}</td>'
    return f"<td{' class=number' if number else ''}>{escape(text)}</td>"


def _frame(grid: Grid, rows: list[str]) -> str:
    head = "".join(
        f'<th scope="col"{" class=number" if column in grid.numbers else ""}>{escape(column)}</th>'
        for column in grid.columns
    )
    # What is wider or higher than the window scrolls by itself, also with the keyboard.
    return "\n".join(
        [
            f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(grid.columns[0])}">'
            f"<table><thead><tr>{head}</tr></thead><tbody>",
            *rows,
            "</tbody></table></div>",
        ]
    )
