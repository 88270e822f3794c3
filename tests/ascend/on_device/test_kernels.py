"""Every kernel, in every compiled form, against its reference."""

import pytest

from recfx.commandline.doctor.checks import ON_A_DEVICE
from recfx.kernels.build import launch
from tests.ascend.cases import BY_NAME, CASES
from tests.ascend.kernel_case import assert_answered, function_at, resolved
from tests.ascend.on_device.device import device


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_answers_as_its_reference(name: str) -> None:
    case, on = BY_NAME[name], device()
    kernel = function_at(case.kernel)
    for build in case.calls.values():
        call = build(lambda tensor: tensor.to(on, copy=True))
        launch.launch(kernel, case.programs, *call.arguments, **resolved(case.constexprs))
        assert_answered(case, call, ON_A_DEVICE)
