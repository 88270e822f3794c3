"""The C++ operators are what these tests are about: without them they would compare references with themselves."""

import pytest

from recfx.kernels.build import library


@pytest.fixture(scope="package", autouse=True)
def operators() -> None:
    """The library is loaded before any test of a family runs."""
    assert library.load(), library.why_not()


@pytest.fixture(autouse=True)
def _two_threads(two_threads: None) -> None:
    pass
