"""Kernels distribute lookups over threads: all tests of targets have two."""

import pytest


@pytest.fixture(autouse=True)
def _two_threads(two_threads: None) -> None:
    pass
