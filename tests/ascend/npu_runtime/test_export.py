"""Models on a (simulated) NPU are exported, and their files serve there: in ATen, waiting once per batch."""

from collections import Counter
from pathlib import Path

import pytest
import torch

import recfx
from tests.ascend.npu_runtime.recorder import Recorder
from tests.ascend.npu_runtime.round_trips import COPY, Meeting, Moment
from tests.ascend.npu_runtime.sharded_training import model_on_npus
from tests.ascend.npu_runtime.training import DEVICE
from tests.exporter.hashed_models import by_name, call, trained
from tests.sharding.cases import batches
from tests.sharding.ranks import on_ranks
from tests.sharding.typical_cases import hashed_case


def _on_device(sample: recfx.Sample) -> tuple[torch.Tensor, ...]:
    return tuple(argument.to(torch.device(DEVICE)) for argument in sample.args)


@pytest.mark.usefixtures("simulated_kernels")
@pytest.mark.parametrize(
    ("is_weighted", "quantize", "portable"),
    [(False, None, True), (False, "int8", True), (True, "int4", True), (True, "int4", False), (True, None, False)],
    ids=["plain", "int8", "weighted int4", "weighted int4 by the kernel", "weighted by the kernel"],
)
def test_the_file_answers_on_the_device_and_on_the_host(
    is_weighted: bool, quantize: str | None, portable: bool, tmp_path: Path
) -> None:
    host = trained(is_weighted)
    recfx.export(host, tmp_path / "host", call(6, is_weighted=is_weighted), quantize=quantize)
    model = trained(is_weighted).to(DEVICE)
    sample = recfx.Sample(*_on_device(call(6, is_weighted=is_weighted)))
    report = recfx.export(model, tmp_path / "model", sample, quantize=quantize, portable=portable)
    assert f"kernel={'aten' if portable else 'triton'}" in report.graph
    assert {parameter.device.type for parameter in model.parameters()} == {"npu"}
    of_host, on_host, on_device = (
        recfx.load(tmp_path / "host"),
        recfx.load(tmp_path / "model"),
        recfx.load(tmp_path / "model", device=DEVICE),
    )
    assert {buffer.device.type for buffer in on_device.script.buffers()} == {"npu"}
    for batch_size in (0, 1, 7):
        for low, high in ((-20, 20), (-(2**63), 2**63 - 1)):
            sample = call(batch_size, seed=9, low=low, high=high, is_weighted=is_weighted)
            expected, answer = of_host(*sample.args), on_device(*_on_device(sample))
            assert answer.device.type == "npu"
            assert torch.allclose(on_host(*sample.args), expected, rtol=1e-5, atol=1e-5)
            assert torch.allclose(answer.cpu(), expected, rtol=1e-5, atol=1e-5)
            inputs = {name: tensor.to(DEVICE) for name, tensor in by_name(sample).items()}
            assert torch.equal(on_device.serve(inputs)["output"], answer)


@on_ranks(2, "hccl")
def test_sharded_models(rank: int, world_size: int, tmp_path: Path) -> None:
    case = hashed_case("row_wise", "error")
    path = tmp_path / "model"
    device = torch.device("npu", rank)
    torch.npu.set_device(device)
    model = model_on_npus(case, world_size, device, ids_on_host=False)
    features = batches(case, world_size, 1)[0][rank]
    report = recfx.export(model, path, (features.to(device),))
    assert "kernel=aten" in report.graph
    assert {parameter.device.type for parameter in model.parameters()} == {"npu"}
    answers = zip(recfx.load(path)(features), model.eval()(features.to(device)), strict=True)
    assert all(torch.allclose(served, answer.cpu(), rtol=1e-5, atol=1e-5) for served, answer in answers)


def test_a_batch_is_checked_once_and_nothing_else_waits(tmp_path: Path) -> None:
    recfx.export(trained(), tmp_path / "model", call(6), device=DEVICE)
    loaded = recfx.load(tmp_path / "model", device=DEVICE)
    arguments = _on_device(call(5, seed=9))
    loaded(*arguments)
    recorder = Recorder(frozenset())
    with recorder:
        recorder.now = Moment("exported", "unsharded", "eval")
        loaded(*arguments)
        recorder.now = None
    assert recorder.calls == Counter({Meeting("aten::_to_copy", COPY, "recfx/exporter/load.py"): 1})
    assert not [name for name in recorder.operators if not name.startswith("aten::")]
