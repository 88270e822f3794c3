"""Names as they can be printed, because a user may have put anything into one."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    """The text in one line that changes no terminal and fits every encoding of Unicode.

    Line breaks, escape sequences, lone surrogates and marks without a width of their own become backslash escapes.
    The characters in ``keep`` stay as they are, such as line breaks that were not in a name.
    """
    if text.isprintable():  # nearly always
        return text
    return "".join(
        letter if letter.isprintable() or letter in keep else letter.encode("unicode_escape").decode()
        for letter in text
    )
