"""No kernel uses what Ascend's tool chain is known to get wrong."""

import pytest

from tests.ascend.cases import ON_ASCEND
from tests.ascend.lint import lint
from tests.ascend.lowered import lowered


@pytest.mark.parametrize("name", [case.name for case in ON_ASCEND])
def test_no_kernel_uses_what_goes_wrong(name: str) -> None:
    assert list(lint(lowered(name))) == []
