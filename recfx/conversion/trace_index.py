"""The pages that list what ``RECFX_TRACE`` has written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from urllib.parse import quote

_CONVERSIONS = "Conversions"
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em; }
table { border-collapse: collapse; margin: .5em 0 1.5em; }
th, td { border: 1px solid #999; padding: .2em .6em; text-align: left; }
td.number { text-align: right; }
"""


def index_page(
    title: str,
    outcome: str,
    versions: Mapping[str, object],
    seconds: Mapping[str, float],
    files: Sequence[tuple[str, str]],
) -> str:
    """The page of one conversion.

    Args:
        title: the name of its folder.
        outcome: how it ended.
        versions: what it ran under.
        seconds: the times of its stages.
        files: name and description of each file in the folder.
    """
    total = sum(seconds.values())
    times = "".join(
        f'<tr><td>{escape(name)}</td><td class="number">{took:.3f}</td></tr>' for name, took in seconds.items()
    )
    parts = [f"<h1>{escape(title)}: {escape(outcome)}</h1>"]
    parts.append(f"<p>{escape(', '.join(f'{name} {value}' for name, value in versions.items()))}</p>")
    rows = "".join(f"<tr><td>{_link(name)}</td><td>{escape(what)}</td></tr>" for name, what in files)
    parts.append(f"<h2>Files</h2><table><tr><th>file</th><th>what is in it</th></tr>{rows}</table>")
    if times:
        parts.append(f"<h2>Times: {total:.3f} s</h2><table><tr><th>stage</th><th>seconds</th></tr>{times}</table>")
    parts.append("<p>There are no weights and no ids in these files.</p>")
    return _page(title, parts)


def index_of_all(folders: Sequence[str]) -> str:
    """The page above the folders of all conversions."""
    rows = "".join(f"<li>{_link(f'{folder}/index.html', folder)}</li>" for folder in folders)
    return _page(_CONVERSIONS, [f"<h1>{_CONVERSIONS}</h1><ul>{rows}</ul>"])


def is_index_of_all(page: str) -> bool:
    """Whether it is a page of ``index_of_all``, and not one that someone else has written."""
    return page.startswith(_head(_CONVERSIONS))


def _link(path: str, text: str = "") -> str:
    return f'<a href="{escape(quote(path))}">{escape(text or path)}</a>'


def _page(title: str, parts: Sequence[str]) -> str:
    return f"{_head(title)}<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"


def _head(title: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="recfx">'
        f"<title>{escape(title)}</title>"
    )
