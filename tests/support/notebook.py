"""Notebooks from scripts whose cells begin with ``# %%``: the script is the source, the notebook has what it prints.

    python -m tests.support.notebook examples/torchrec_tour.py

writes ``examples/torchrec_tour.ipynb``.
"""

import ast
import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

MARKDOWN = "[markdown]"


def cells(script: str) -> list[dict[str, Any]]:
    """The cells of a notebook without outputs; ``# %% [markdown]`` begins a comment that is one of text."""
    made = []
    for number, part in enumerate(re.split(r"^# %%", script, flags=re.MULTILINE)[1:]):
        first, _, text = part.partition("\n")
        is_text = first.strip() == MARKDOWN
        lines = text.strip().splitlines()
        if is_text:
            lines = [line.removeprefix("#").removeprefix(" ") for line in lines]
        kind: dict[str, Any] = {"cell_type": "markdown"} if is_text else {"cell_type": "code", "execution_count": None}
        source = "\n".join(lines).splitlines(keepends=True)
        cell = {**kind, "id": f"cell-{number}", "metadata": {}, "source": source}
        made.append(cell if is_text else {**cell, "outputs": []})
    return made


def run(made: list[dict[str, Any]], names: dict[str, Any]) -> None:
    """Run the cells in ``names`` and put in what they print."""
    for count, cell in enumerate((cell for cell in made if cell["cell_type"] == "code"), start=1):
        tree = ast.parse("".join(cell["source"]))
        *_, last = tree.body
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if isinstance(last, ast.Expr):
                tree.body.pop()
            exec(compile(tree, cell["id"], "exec", dont_inherit=True), names)
            if isinstance(last, ast.Expr):
                eval(compile(ast.Expression(last.value), cell["id"], "eval", dont_inherit=True), names)
        cell["execution_count"] = count
        if text := printed.getvalue():
            cell["outputs"].append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})


def main(path: Path) -> None:
    """Write the notebook of a script beside it."""
    sys.path.insert(0, str(path.parent.resolve()))
    made = cells(path.read_text(encoding="utf-8"))
    run(made, sys.modules["__main__"].__dict__)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    path.with_suffix(".ipynb").write_text(json.dumps(notebook, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
