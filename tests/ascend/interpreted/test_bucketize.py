"""The kernels that route ids on a device, in both forms: what they refuse, and the form for GPUs on any batch."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from recfx.kernels.build import launch
from recfx.kernels.route.bucketize import WHOLE, Routes
from tests.kernels.routes import batches, by_kernels, by_reference

ROUTES = Routes([[], [0, 4, 10]], [0, 0], [0, 10], [0, 0], [0, 0], [0, 1, 1, 1], [WHOLE, 0, 1, 0])


@pytest.fixture(autouse=True, params=[True, False], ids=["on_gpu", "elsewhere"])
def _form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "takes_gpu_forms", lambda device: request.param)


@given(batches())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_batch(batch: tuple[torch.Tensor, torch.Tensor, int, Routes, torch.Tensor | None]) -> None:
    for one, other in zip(by_kernels(*batch), by_reference(*batch), strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("bad", [-1, 10, 2**63 - 1, -(2**63)])
def test_ids_out_of_range_are_refused(bad: int) -> None:
    ids = torch.tensor([77, -5, 3, 9, bad, 12])
    with pytest.raises(IndexError, match=f"id {bad} of feature 1 is outside its 10 rows"):
        by_kernels(ids, torch.tensor([1, 1, 0, 4]), 2, ROUTES)


@pytest.mark.parametrize("lengths", [[1, 1, 0, 5], [1, 1, 0, 3], [-1, 3, 0, 4], [2**40, 0, 0, 0], [9, -9, 9, -3]])
def test_lengths_that_do_not_fit_are_refused(lengths: list[int]) -> None:
    """Nothing outside of the ids is read before."""
    with pytest.raises(RuntimeError, match="there are 6 ids"):
        by_kernels(torch.arange(6), torch.tensor(lengths), 2, ROUTES)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (ROUTES._replace(row_borders=[[], [0, 11, 10]]), "row borders of feature 1 must ascend from 0 to 10"),
        (ROUTES._replace(pieces=[WHOLE, 0, 1, 2]), "feature 1 has no piece 2"),
        (ROUTES._replace(sources=[0, 1, 1, 2]), "feature 2 has no piece 0"),
    ],
)
def test_routes_that_do_not_fit_are_refused(routes: Routes, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        by_kernels(torch.arange(6), torch.tensor([1, 1, 0, 4]), 2, routes)
