"""A page of HTML: complete, without other files or scripts, with everything escaped, and readable in any browser."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from html import escape as escape_html

from recfx.errors import printable
from recfx.printing.grid import Grid

_STYLE = """
:root { color-scheme: light dark; --text: #1c1c1c; --page: #fff; --line: #ccc; --head: #f2f2f2; --code: #f7f7f7;
  --ok: #176b2c; --error: #a51414; --warning: #8a5a00; --info: #444; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e4e4; --page: #16181b; --line: #444; --head: #24272b;
  --code: #1e2124; --ok: #6fd08c; --error: #ff8f8f; --warning: #f0c060; --info: #b8b8b8; } }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 96em; padding: 0 1em; color: var(--text);
  background: var(--page); }
h1, h2, h3, summary { overflow-wrap: anywhere; }
.scroll { overflow: auto; max-height: 85vh; margin: .5em 0 1.5em; }
:focus-visible { outline: 2px solid var(--info); }
table { border-collapse: separate; border-spacing: 0; border-top: 1px solid var(--line);
  border-left: 1px solid var(--line); }
th, td { border-right: 1px solid var(--line); border-bottom: 1px solid var(--line); padding: .2em .6em;
  text-align: left; vertical-align: top; max-width: 36em; overflow-wrap: break-word; }
th { background: var(--head); white-space: nowrap; position: sticky; top: 0; }
.number { text-align: right; white-space: nowrap; }
pre { background: var(--code); overflow-x: auto; padding: .6em; }
details { margin: .3em 0; }
summary { cursor: pointer; }
.ok { color: var(--ok); } .error { color: var(--error); }
tr.error td:nth-child(-n+2) { color: var(--error); font-weight: 600; }
tr.warning td:nth-child(-n+2) { color: var(--warning); font-weight: 600; }
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
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f'<h1 class="{status}">{escape(title)}</h1>',
    ]
    return "\n".join([*head, *parts, "</body></html>"]) + "\n"


def escape(text: str) -> str:
    """The text as it is read in the page, which can be written in any encoding of Unicode."""
    return escape_html(printable(text))


def pre(text: str) -> str:
    """Text of several lines, as it is."""
    return f'<pre tabindex="0">{escape_html(printable(text, keep=chr(10)))}</pre>'


def table(grid: Grid, classes: Iterable[str] = ()) -> list[str]:
    """A table, without its title.

    Args:
        grid: what is in it.
        classes: the class of each row, if they have any.
    """
    numbers = [column in grid.numbers for column in grid.columns]
    of_rows = list(classes) or [""] * len(grid.rows)
    lines = [
        f"<tr{f' class={of_row}' if of_row else ''}>{''.join(map(_cell, row, numbers))}</tr>"
        for row, of_row in zip(grid.rows, of_rows, strict=True)
    ]
    below = [f"<p>{escape(grid.more)}</p>"] if grid.more else []
    return [frame(grid.columns, lines, grid.numbers), *below]


def _cell(text: str, number: bool) -> str:
    return f'<td class="number">{escape(text)}</td>' if number else f"<td>{escape(text)}</td>"


def frame(columns: tuple[str, ...], rows: list[str], numbers: Collection[str] = ()) -> str:
    """A table around rows that are HTML already."""
    head = "".join(
        f'<th scope="col"{" class=number" if column in numbers else ""}>{escape(column)}</th>' for column in columns
    )
    # What is wider or higher than the window scrolls by itself, also with the keyboard.
    return "\n".join(
        [
            f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(columns[0])}">'
            f"<table><thead><tr>{head}</tr></thead><tbody>",
            *rows,
            "</tbody></table></div>",
        ]
    )
