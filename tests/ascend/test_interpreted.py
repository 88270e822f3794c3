"""Level 1: kernels in Triton's interpreter answer as their references do, and read nothing that they have written."""

import pytest
import torch

from tests.ascend import tools, written_then_read
from tests.ascend.cases import BY_NAME, CASES
from tests.ascend.interpreter import interpreter
from tests.ascend.kernel_case import assert_answered, function_at, resolved


def answer(name: str) -> None:
    """In the interpreter's process: every call of a case."""
    case = BY_NAME[name]
    kernel = function_at(case.kernel)
    for build in case.calls.values():
        call = build(torch.clone)
        with written_then_read.refused():
            kernel[(case.programs,)](*call.arguments, **resolved(case.constexprs))
        assert_answered(case, call)


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_answers_as_its_reference(name: str) -> None:
    tools.triton().require()
    interpreter().run(answer, name)
