"""Which faults in C++: operators, numbers, conditions and whole statements inside functions.

The sources are formatted by clang-format, so that operators between two operands have spaces, and template brackets,
references and pointers have none: no parser is needed. A few of the changed files do not compile; these are no mutants.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.tools.mutants.mutant import Mutant

_NO_CODE = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | R"\((?:.*?)\)" | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])' | ^[ \t]*\#(?:\\\n|[^\n])*""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_OPERATORS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&",
    "+": "-", "-": "+", "*": "/", "/": "*", "%": "/", "&": "|", "|": "&", "^": "|", "<<": ">>", ">>": "<<",
    "+=": "-=", "-=": "+=", "*=": "/=", "/=": "*=", "|=": "&=", "&=": "|=", "^=": "|=", "<<=": ">>=", ">>=": "<<=",
}  # fmt: skip
_WORDS = {"true": "false", "false": "true", "std::min": "std::max", "std::max": "std::min", "break": "continue"}
_BETWEEN = re.compile(rf"(?<=[\w)\]] )(?:{'|'.join(sorted(map(re.escape, _OPERATORS), key=len, reverse=True))})(?=\s)")
_WORD = re.compile(rf"(?<![\w:])(?:{'|'.join(_WORDS)})\b")
_NUMBER = re.compile(r"(?<![\w.'])\d+(?![\w.'>])")
_STEP = re.compile(r"\+\+|--")
_NOT = re.compile(r"!(?=[\w(])")
_CONDITION = re.compile(r"\b(?:if|while) \(")
_STATEMENT = re.compile(r"[^\s=(]+\(|[^\s=]+ (?:[-+*/|&^%]|<<|>>)?=\s|\+\+|--|(?:continue|break)$")
_NO_FUNCTION = re.compile(r"\b(?:namespace|class|struct|union|enum|extern)\b(?!.*\()|^\s*TORCH_LIBRARY", re.DOTALL)
_SPEED_ALONE = re.compile(r"reserve\(|shrink_to_fit\(|prefetch|madvise|static_assert|RECFX_|INTERNAL_ASSERT")


def mutants_of(path: Path) -> list[Mutant]:
    """Every fault that is tried in one file, in the order of its lines."""
    text = path.read_text()
    code = _NO_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    inside, lines = _in_functions(code), text.splitlines()
    mutants = []
    for start, stop, new in sorted(_changes(code)):
        line = text.count("\n", 0, start) + 1
        if inside[start] and not _SPEED_ALONE.search(lines[line - 1]):
            mutants.append(Mutant(path, line, text, partial(_changed, text, start, stop, new)))
    return mutants


def _changed(text: str, start: int, stop: int, new: str) -> str:
    return text[:start] + new + text[stop:]


def _changes(code: str) -> Iterator[tuple[int, int, str]]:
    """Where each change begins and ends, and what is put there."""
    for match in _BETWEEN.finditer(code):
        yield *match.span(), _OPERATORS[match[0]]
    for match in _WORD.finditer(code):
        yield *match.span(), _WORDS[match[0]]
    for match in _NUMBER.finditer(code):
        yield *match.span(), str(int(match[0]) + 1)
    for match in _STEP.finditer(code):
        yield *match.span(), {"++": "--", "--": "++"}[match[0]]
    for match in _NOT.finditer(code):
        yield *match.span(), ""
    for match in _CONDITION.finditer(code):
        stop = _closing(code, match.end() - 1)
        if ";" not in code[match.end() : stop]:
            yield match.end(), stop, f"!({code[match.end() : stop]})"
    for start, stop in _statements(code):
        yield start, stop, ""


def _closing(code: str, opening: int) -> int:
    """The position of the bracket that closes this one."""
    depth = 0
    for position in range(opening, len(code)):
        depth += (code[position] == "(") - (code[position] == ")")
        if depth == 0:
            return position
    raise ValueError(f"bracket {opening} is not closed")


def _statements(code: str) -> Iterator[tuple[int, int]]:
    """Calls whose answer is not used, assignments, steps and jumps: where each begins, and its semicolon."""
    start = depth = 0
    for position, sign in enumerate(code):
        depth += (sign == "(") - (sign == ")")
        if sign in "{}" or (sign == ";" and depth <= 0):
            depth = 0
            begin = start + len(code[start:position]) - len(code[start:position].lstrip())
            if sign == ";" and _STATEMENT.match(code[begin:position]):
                yield begin, position
            start = position + 1


def _in_functions(code: str) -> list[bool]:
    """Of each position, whether it is inside the body of a function."""
    inside, bodies, start = [], [False], 0
    for position, sign in enumerate(code):
        inside.append(bodies[-1])
        if sign == "{":
            head = code[start:position]
            bodies.append(bodies[-1] or (")" in head and not _NO_FUNCTION.search(head)))
        elif sign == "}":
            bodies.pop()
        if sign in "{};":
            start = position + 1
    return inside
