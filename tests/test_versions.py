"""The table of sets, and what else names versions: pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from recfx.versions import DEFAULT, PYTHONS, SETS, minor, nearest, set_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it too

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
RANGES = {each.name: each.specifier for each in map(Requirement, PROJECT["dependencies"])}
NEARBY = [f"{major}.{minor}.{patch}" for major in (1, 2) for minor in range(30) for patch in (0, 1)]


@pytest.mark.parametrize("package", ["torch", "torchrec"])
def test_ranges_hold_the_minor_versions_of_the_sets_alone(package: str) -> None:
    of_sets = {minor(getattr(each, package)) for each in SETS}
    assert {minor(version) for version in RANGES[package].filter(NEARBY)} == of_sets


def test_ranges_hold_what_torchrec_needs() -> None:
    assert all(each.tensordict in RANGES["tensordict"] for each in SETS)


@pytest.mark.parametrize("extra", ["cpu", "npu", "cuda"])
def test_extras_install_the_default_set(extra: str) -> None:
    asked = {each.name: each.specifier for each in map(Requirement, EXTRAS[extra])}
    assert asked["torch"] == f"=={DEFAULT.name}.*"
    assert asked["torchrec"] == f"=={minor(DEFAULT.torchrec)}.*"
    assert DEFAULT.fbgemm + ("" if extra == "cuda" else "+cpu") in asked["fbgemm-gpu"]
    assert extra != "npu" or DEFAULT.torch_npu in asked["torch_npu"]


def test_tests_use_the_triton_of_the_default_set() -> None:
    (triton,) = (each.specifier for each in map(Requirement, EXTRAS["dev"]) if each.name == "triton")
    assert str(triton) == f"=={DEFAULT.triton}"


def test_pythons_are_those_of_the_project() -> None:
    least, most = PYTHONS[0], f"3.{int(PYTHONS[-1].split('.')[1]) + 1}"
    assert PROJECT["requires-python"] == f">={least},<{most}"
    assert f"Programming Language :: Python :: {PYTHONS[-1]}" in PROJECT["classifiers"]


def test_sets_are_in_order() -> None:
    assert [each.torch for each in SETS] == sorted((each.torch for each in SETS), key=Version)
    assert all(minor(each.torch_npu) == each.name for each in SETS)


def test_the_set_of_a_version() -> None:
    assert set_of("2.13.7+cu126") == DEFAULT
    assert set_of("2.8.0") is None
    assert (nearest("2.8.0"), nearest("2.6"), nearest("")) == (SETS[1], SETS[0], SETS[0])
