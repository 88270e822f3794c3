"""Converted models on the device: they train, answer, are saved and exported as on the CPU."""

from pathlib import Path

import pytest
import torch

import recfx
from recfx.ir import format_graph
from tests.ascend.on_device.device import device
from tests.ascend.on_device.training import RUNS, difference
from tests.exporter.hashed_models import HASHING, HashedModel, call, trained

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def target() -> str:
    """The target whose kernels these tests are about."""
    return "npu" if device().type == "npu" else "triton"


@pytest.mark.parametrize(("ids", "optimizer"), RUNS)
def test_models_train_as_on_the_cpu(ids: str, optimizer: str) -> None:
    """Outputs in train and eval mode, weights, indexes and the states of optimizers."""
    assert difference(ids, optimizer, device()) == ""


def test_the_kernels_are_those_of_the_device() -> None:
    model = recfx.convert(HashedModel().to(device()), hashing=HASHING["shared_by_two"], backend=target())
    model(*(argument.to(device()) for argument in call(3).args))
    assert f"kernel={target()}" in format_graph(model.ebc.graph_module).replace("'", "")  # whatever their form is


def test_a_model_that_moves_answers_as_it_did() -> None:
    """Weights, indexes and what eval mode keeps on the device move together, there and back."""
    model, sample = trained(), call(7, seed=9)
    dense, features = sample.args
    expected = model(dense, features)
    model.to(device())
    torch.testing.assert_close(model(dense.to(device()), features.to(device())).cpu(), expected, **CLOSE)
    model.to("cpu")
    torch.testing.assert_close(model(dense, features), expected, rtol=0, atol=0)


@pytest.mark.parametrize("is_weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize(("quantize", "portable"), [(None, True), (None, False), ("int8", True), ("int4", False)])
def test_exported_files_answer_there(is_weighted: bool, quantize: str | None, portable: bool, tmp_path: Path) -> None:
    model = trained(is_weighted)
    recfx.export(model, tmp_path / "host", call(6, is_weighted=is_weighted), quantize=quantize)
    sample = recfx.Sample(*(argument.to(device()) for argument in call(6, is_weighted=is_weighted).args))
    recfx.export(model.to(device()), tmp_path / "model", sample, quantize=quantize, portable=portable)
    host, loaded = recfx.load(tmp_path / "host"), recfx.load(tmp_path / "model", device=device())
    for batch_size in (0, 1, 7):
        arguments = call(batch_size, seed=9, low=-(2**63), high=2**63 - 1, is_weighted=is_weighted).args
        output = loaded(*(argument.to(device()) for argument in arguments))
        assert output.device.type == device().type
        torch.testing.assert_close(output.cpu(), host(*arguments), rtol=1e-4, atol=1e-4)


def test_checkpoints_go_from_one_device_to_the_other(tmp_path: Path) -> None:
    model = trained().to(device())
    recfx.save_checkpoint(model, tmp_path / "saved")
    other = trained()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    recfx.load_checkpoint(other, tmp_path / "saved")
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(other.state_dict()[name], value.cpu(), rtol=0, atol=0)
