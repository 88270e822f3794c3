"""Every README is run: its Python blocks, in order; a text block is what the block before it prints.

What a README names or links to must be there, and all of them can be reached from the first one.
"""

import contextlib
import io
import re
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.sharding.ranks import ranks
from tests.support.own_operators import forgotten_afterwards
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
FIRST = "README.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FOLDERS = ("recfx", "lowering", "kernels", "tests", "examples")
SUFFIXES = ("py", "md", "txt", "h", "cpp", "html", "js")


def _known_to_git() -> list[str]:
    if not (ROOT / ".git").exists():
        return []
    listing = subprocess.run(
        ["git", "ls-files", "-z", FIRST, f"*/{FIRST}"], cwd=ROOT, capture_output=True, check=True, text=True, timeout=60
    )
    return sorted(name for name in listing.stdout.split("\0") if name and (ROOT / name).exists())


READMES = _known_to_git()


def blocks(text: str) -> list[tuple[str, str, int]]:
    """The language of each block, what is in it, and how many lines come before that."""
    return [(block[1], block[2], text.count("\n", 0, block.start(2))) for block in BLOCK.finditer(text)]


def run(text: str, file: str, compare: bool = True) -> int:
    """Run the blocks of a README in a module of its own, and return how many outputs there are, which are compared."""
    module = types.ModuleType("readme")
    sys.modules["readme"] = module  # torch.fx looks up the module of traced classes
    printed, compared = "", 0
    try:
        for language, block, line in blocks(text):
            if language == "text":
                assert printed == block or not compare, (
                    f"{file}, line {line}: this is not what the block before it prints"
                )
                printed, compared = "", compared + 1
            elif language == "python":
                assert not printed, f"{file}, line {line}: no text block shows what the block before it prints"
                output = io.StringIO()
                with contextlib.redirect_stdout(output):
                    # the lines before it, so that errors name the line of the file
                    exec(compile("\n" * line + block, file, "exec", dont_inherit=True), module.__dict__)
                printed = output.getvalue()
        assert not printed, f"{file}: no text block shows what the last block prints"
    finally:
        del sys.modules["readme"]
    return compared


@pytest.fixture
def as_only_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that torchrun sets in a script that it starts once."""
    of_torchrun = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": free_port()}
    for name, value in (of_torchrun | {"MASTER_ADDR": "127.0.0.1"}).items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.usefixtures("as_only_rank")
@pytest.mark.parametrize("name", [name for name in READMES if "```python\n" in (ROOT / name).read_text()])
def test_every_block_runs_and_prints_what_the_readme_says(name: str) -> None:
    with forgotten_afterwards():
        run((ROOT / name).read_text(), str(ROOT / name))


def test_the_example_of_several_ranks_runs_on_two() -> None:
    name = "recfx/collections/sharding/README.md"
    assert ranks(2).run(_on_a_rank, (ROOT / name).read_text(), name) == [2, 2]


def _on_a_rank(rank: int, world_size: int, text: str, file: str) -> int:
    """Run a README in the process group that is there; what a rank prints is its own."""
    with mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT):
        return run(text, file, compare=False)


@pytest.mark.parametrize("name", READMES)
def test_files_that_it_names_are_there(name: str) -> None:
    assert missing_files((ROOT / name).read_text(), (ROOT / name).parent) == []


def missing_files(text: str, folder: Path) -> list[str]:
    """Paths and names of files in backticks that exist neither here nor below the root of the repository."""
    prose = BLOCK.sub("", text)
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})(?:/[\w.]+)*/?|[\w/.]+\.(?:{'|'.join(SUFFIXES)}))`", prose)
    return [path for path in named if not (ROOT / path).exists() and not (folder / path).exists()]


@pytest.mark.parametrize("name", READMES)
def test_its_links_lead_somewhere(name: str) -> None:
    assert broken_links((ROOT / name).read_text(), (ROOT / name).parent) == []


def broken_links(text: str, folder: Path) -> list[str]:
    """Links to files that are not there, or to headings that they do not have."""
    broken = []
    for link in links(text):
        path, _, heading = link.partition("#")
        exists = (folder / path).exists()
        if not exists or (heading and heading not in headings((folder / path).read_text() if path else text)):
            broken.append(link)
    return broken


def links(text: str) -> list[str]:
    """The links of a page within the repository."""
    return [link for link in LINK.findall(BLOCK.sub("", text)) if "://" not in link]


def headings(text: str) -> set[str]:
    """The anchors of a page's headings, as the usual viewers make them."""
    titles = re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.skipif(not READMES, reason="not a checkout")
def test_all_can_be_reached_from_the_first_which_is_short() -> None:
    reached: set[str] = set()
    ahead = [FIRST]
    while ahead:
        name = ahead.pop()
        reached.add(name)
        targets = [(ROOT / name).parent / link.partition("#")[0] for link in links((ROOT / name).read_text())]
        inside = {str(target.resolve().relative_to(ROOT)) for target in targets if target.name == FIRST}
        ahead += inside - reached
    assert sorted(reached) == READMES
    assert (ROOT / FIRST).read_text().count("\n") <= 150
