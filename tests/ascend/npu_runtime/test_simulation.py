"""The simulated NPU itself: what would make every other test here pass for the wrong reason is refused."""

from __future__ import annotations

import pytest
import torch

from tests.ascend.npu_runtime.simulated_operators import calls


def test_there_are_two_devices() -> None:
    assert torch.npu.device_count() == 2
    assert torch.empty(2, device="npu:1").device == torch.device("npu:1")


def test_numbers_are_computed_in_the_memory_of_the_device() -> None:
    calls.clear()
    tensor = torch.arange(6, device="npu:1").view(2, 3)
    tensor[:, 1].add_(10)
    assert tensor.tolist() == [[0, 11, 2], [3, 14, 5]]
    assert calls["aten::add_.Tensor"] == 1
    assert (tensor.t() + 1).device == torch.device("npu:1")


@pytest.mark.parametrize("other", ["npu:1", "cpu"])
def test_an_operator_takes_tensors_of_one_device(other: str) -> None:
    with pytest.raises(RuntimeError, match="on one device"):
        torch.ones(3, device="npu:0") + torch.ones(3, device=other)


def test_autograd_runs_on_the_device() -> None:
    weight = torch.ones(3, 2, device="npu:0", requires_grad=True)
    (weight * torch.arange(3.0, device="npu:0").view(3, 1)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.device == weight.device
    assert weight.grad.cpu().tolist() == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_an_operator_with_torch_npus_own_autograd(reduction: str) -> None:
    gradients = []
    for device in ("cpu", "npu:0"):
        logits = torch.arange(3.0, device=device, requires_grad=True)
        target = torch.tensor([0.0, 1.0, 1.0], device=device)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, target, reduction=reduction)
        loss.backward(torch.ones_like(loss))
        assert logits.grad is not None
        gradients.append(logits.grad.cpu())
    torch.testing.assert_close(gradients[1], gradients[0])


def test_an_out_argument_grows() -> None:
    out = torch.empty(0, device="npu:0")
    assert torch.add(torch.ones(3, device="npu:0"), 1, out=out) is out
    assert out.tolist() == [2, 2, 2]


def test_copies_return_what_they_wrote_to() -> None:
    on_host, on_device = torch.zeros(3), torch.ones(3, device="npu:1")
    assert on_host.copy_(on_device) is on_host
    assert on_host.tolist() == [1, 1, 1]
    assert on_device.copy_(torch.arange(3)) is on_device
    assert on_device.tolist() == [0, 1, 2]


def test_streams_and_events() -> None:
    stream, event = torch.npu.Stream(), torch.npu.Event()
    with torch.npu.stream(stream):
        tensor = torch.ones(4).pin_memory().to("npu:0", non_blocking=True)
        event.record()
    torch.npu.current_stream().wait_event(event)
    tensor.record_stream(torch.npu.current_stream())
    assert event.query()
    assert tensor.sum().item() == 4
