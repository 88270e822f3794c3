"""The README is run: every Python block, in order; a text block is what the block before it prints."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import types
from pathlib import Path

from tests.support.own_operators import forgotten_afterwards

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def test_every_block_runs_and_prints_what_the_readme_says() -> None:
    module = types.ModuleType("readme")
    sys.modules["readme"] = module  # torch.fx looks up the module of traced classes
    printed = ""
    compared = 0
    try:
        with forgotten_afterwards():
            for language, text in BLOCK.findall(README.read_text()):
                if language == "python":
                    output = io.StringIO()
                    with contextlib.redirect_stdout(output):
                        exec(compile(text, "README.md", "exec", dont_inherit=True), module.__dict__)
                    printed = output.getvalue()
                elif language == "text":
                    assert printed == text
                    compared += 1
    finally:
        del sys.modules["readme"]
    assert compared >= 6


def test_files_that_it_names_are_there() -> None:
    named = re.findall(r"`((?:recfx|lowering|kernels|tests|examples)(?:/[\w.]+)*/?)`", README.read_text())
    assert len(set(named)) > 30
    assert not [path for path in named if not (README.parent / path).exists()]
