"""The table of sets, and what else names versions: pyproject.toml, the stand-in for FBGEMM, README.md."""

import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from recfx.versions.sets import DEFAULT, SETS, minor, nearest, set_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it too

ROOT = Path(__file__).parents[1]
PROJECT, STAND_IN = (
    tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    for folder in (".", ".packaging/fbgemm-gpu")
)
EXTRAS = PROJECT["optional-dependencies"]


def requirements(texts: list[str]) -> dict[str, Requirement]:
    return {requirement.name: requirement for requirement in map(Requirement, texts)}


def test_recfx_takes_the_set_that_is_there() -> None:
    """pip would replace a torch that recfx asked for, and add FBGEMM's CUDA build if it asked for TorchRec."""
    assert set(requirements(PROJECT["dependencies"])) == {"numpy", "rich", "sympy", "tqdm"}
    assert set(EXTRAS) == {"cuda", "dev"}


@pytest.mark.parametrize(
    ("texts", "fbgemm"), [(EXTRAS["cuda"], "fbgemm-gpu"), (STAND_IN["dependencies"], "fbgemm-gpu-cpu")]
)
def test_the_default_set_is_installed(texts: list[str], fbgemm: str) -> None:
    expected = {"torch": DEFAULT.torch, "torchrec": DEFAULT.torchrec, "tensordict": DEFAULT.tensordict}
    expected[fbgemm] = DEFAULT.fbgemm
    asked = requirements(texts)
    assert set(asked) == set(expected)
    for name, version in expected.items():
        assert version in asked[name].specifier
        assert f"{minor(version).replace('.', '.9')}" not in asked[name].specifier


def test_the_stand_in_is_not_taken_for_the_cuda_build() -> None:
    build = requirements(EXTRAS["cuda"])["fbgemm-gpu"].specifier
    assert (STAND_IN["name"], STAND_IN["version"]) == ("fbgemm-gpu", f"{DEFAULT.fbgemm}+cpu")
    assert STAND_IN["version"] not in build


def test_the_commands_of_the_readme_install_the_default_set() -> None:
    text = (ROOT / "README.md").read_text()
    assert all(f"`{DEFAULT.install(device)}`" in text for device in ("cpu", "cuda"))
    assert f"`torch_npu=={DEFAULT.torch_npu}`" in text
    assert f"torch_npu=={DEFAULT.torch_npu}\n" in (ROOT / "Makefile").read_text()
    names = [versions.name for versions in SETS]
    assert f"torch {', '.join(names[:-1])} and {names[-1]}" in text


def test_the_set_of_a_version() -> None:
    assert set_of("2.13.7+cu126") == DEFAULT
    assert set_of("2.8.0") is None
    assert (nearest("2.8.0"), nearest("2.6"), nearest("")) == (SETS[1], SETS[0], SETS[0])
