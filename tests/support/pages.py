"""A browser for the tests of pages, started once: fixtures of all tests."""

import os
from collections.abc import Iterator

import pytest

from tests.support.browser import Browser, Page, browser, find_browser


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """A browser; without one, its tests are skipped, unless RECFX_BROWSER_REQUIRED is set."""
    program = find_browser()
    if program is None:
        missing = "no Chromium on this machine (RECFX_BROWSER=PATH names one that is called otherwise)"
        if os.environ.get("RECFX_BROWSER_REQUIRED"):
            pytest.fail(missing)
        pytest.skip(missing)
    with browser(program) as opened:
        yield opened


@pytest.fixture
def page(chromium: Browser) -> Page:
    """A new page, of a size at which before, after and details stand side by side."""
    made = chromium.page()
    made.show(width=1500, height=1000)
    return made
