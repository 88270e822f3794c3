"""What every exported file does alike, whatever its format and its operators."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

import recfx
from tests.exporter.changed_records import (
    ChangeRecords,
    Records,
    rewrite,
    swapped,
    with_another,
    with_manifest,
    without_one,
)
from tests.exporter.hashed_models import FEATURES, FORMATS, IDS, SequenceModel, by_name, call, trained
from tests.support.forked_script import run_script
from tests.support.refusals import refused


@pytest.fixture(scope="module", params=["pooled", "sequence"])
def model(request: pytest.FixtureRequest, model_of: dict[bool, nn.Module]) -> nn.Module:
    """A trained model, which no test changes."""
    return model_of[False] if request.param == "pooled" else trained(model=SequenceModel)


@pytest.fixture(scope="module", params=FORMATS)
def file(model: nn.Module, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "model"
    recfx.export(model, path, call(6), **FORMATS[request.param])
    return path


@pytest.fixture(scope="module")
def loaded(file: Path) -> recfx.LoadedModel:
    return recfx.load(file)


def test_features_come_in_any_order(model: nn.Module, loaded: recfx.LoadedModel) -> None:
    dense, features = call(5, seed=9).args
    more = KeyedJaggedTensor(["other"], torch.arange(3), lengths=torch.tensor([1, 0, 2, 0, 0]))
    shuffled = KeyedJaggedTensor.concat([more, features.permute([2, 0, 3, 1])])
    assert shuffled.keys() != FEATURES
    if loaded.manifest["format"] == "pt2":
        with refused("other_features", error=recfx.InputError):
            loaded(dense, shuffled)
        return
    assert torch.allclose(loaded(dense, shuffled), model(dense, features), rtol=1e-5, atol=1e-6)


EXTREME = [-(2**63), 2**63 - 1, -1, 0, 1]


def check_answers(model: nn.Module, loaded: recfx.LoadedModel, is_weighted: bool = False) -> None:
    for batch_size in (0, 1, 2, 7):
        for low, high in IDS:
            sample = call(batch_size, seed=9, low=low, high=high, is_weighted=is_weighted)
            assert torch.allclose(loaded(*sample.args), model(*sample.args), rtol=1e-5, atol=1e-6), (batch_size, low)


def test_batches_of_any_size(model: nn.Module, loaded: recfx.LoadedModel) -> None:
    check_answers(model, loaded)


@pytest.mark.parametrize("sizes", [(0, 1), (7, 7, 0)], ids=str)
def test_no_fuser_takes_anything(model: nn.Module, file: Path, sizes: tuple[int, ...]) -> None:
    """TorchScript's own is for GPUs, where it fails for batches of 0; on the CPU it has no compiler to call."""
    loaded = recfx.load(file)
    torch._C._jit_override_can_fuse_on_cpu(True)
    try:
        for sample in map(call, sizes):
            answers = [loaded(*sample.args), loaded.serve(by_name(sample))["output"]]
            if loaded.manifest["format"] == "torchscript":
                answers.append(loaded.script(*sample.args))
            for answer in answers:
                torch.testing.assert_close(answer, model(*sample.args), rtol=1e-5, atol=1e-6)
    finally:
        torch._C._jit_override_can_fuse_on_cpu(False)


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_weights(options: dict[str, Any], model_of: dict[bool, nn.Module], tmp_path: Path) -> None:
    recfx.export(model_of[True], tmp_path / "model", call(6, is_weighted=True), **options)
    loaded = recfx.load(tmp_path / "model")
    check_answers(model_of[True], loaded, is_weighted=True)
    with refused("missing_weights", error=recfx.InputError):
        loaded(*call(6).args)


@pytest.mark.parametrize(
    "features",
    [
        KeyedJaggedTensor(FEATURES, torch.tensor([*EXTREME * 3, 0, 19]), lengths=torch.tensor([5, 5, 5, 2])),
        KeyedJaggedTensor([*FEATURES, "a"], torch.arange(1, 6), lengths=torch.ones(5).long()),
    ],
    ids=["extreme ids", "the later one of two features of one name counts"],
)
def test_unusual_batches(model: nn.Module, loaded: recfx.LoadedModel, features: KeyedJaggedTensor) -> None:
    dense = torch.zeros(1, 1)
    if loaded.manifest["format"] == "pt2" and features.keys() != FEATURES:
        with refused("other_features", error=recfx.InputError):
            loaded(dense, features)
        return
    assert torch.allclose(loaded(dense, features), model(dense, features), rtol=1e-5, atol=1e-6)


def test_plain_tensors_by_name(model: nn.Module, loaded: recfx.LoadedModel) -> None:
    sample = call(5, seed=9)
    inputs = by_name(sample)
    assert torch.allclose(loaded.serve(inputs)["output"], model(*sample.args), rtol=1e-5, atol=1e-6)
    ids, lengths = inputs["features.a.values"], inputs["features.a.lengths"]
    for wrong, reason in (
        ({"dense": inputs["dense"].view(-1)}, "wrong_rank"),
        ({"dense": inputs["dense"].long()}, "wrong_dtype"),
        ({"features.z.values": torch.zeros(1)}, "unknown_input"),
        ({"features.a.values": ids.float()}, "wrong_id_dtype"),
        ({"features.a.values": ids.view(1, -1)}, "bad_ids"),
        ({"features.a.lengths": -lengths}, "bad_lengths"),
        ({"features.a.lengths": lengths[:-1]}, "bad_lengths"),
        ({"features.a.lengths": lengths + 1}, "bad_lengths"),
        ({"features.a.lengths": lengths.double()}, "bad_lengths"),
        ({"features.a.lengths": torch.tensor([2**62] * 4 + [ids.numel()])}, "bad_lengths"),
        ({"features.d.values": inputs["features.d.values"] + 20}, "id_out_of_range"),
    ):
        with refused(reason, match=next(iter(wrong)).split(".")[:2][-1], error=recfx.InputError):
            loaded.serve(inputs | wrong)
    message = r"int64 or int32\. What to do: convert the ids with \.long"
    with refused("wrong_id_dtype", match=message, error=recfx.InputError):
        loaded.serve(inputs | {"features.a.values": ids.double()})
    assert set(loaded.inputs) == set(inputs)
    whole: Any = dict(inputs)
    del inputs["features.b.lengths"], inputs["dense"]
    with refused("unknown_input", match="no more.* and it lacks dense, features.b.lengths", error=recfx.InputError):
        loaded.serve(inputs | {"more": ids})
    with refused("missing_input", match="it lacks dense, features.b.lengths", error=recfx.InputError):
        loaded.serve(inputs)
    for passed, told in (
        ([ids], "the inputs are a list, not a dict"),
        (whole | {"features.b.lengths": None}, "input features.b.lengths is None, not a tensor"),
        (whole | {"dense": whole["dense"].to("meta")}, "input dense is on device 'meta', which holds no values. What"),
    ):
        with refused("wrong_argument", match=re.escape(told), error=recfx.InputError):
            loaded.serve(passed)
    with pytest.raises((RuntimeError, torch.jit.Error), match=r"input features.a.values is on .*\[wrong_argument\]"):
        loaded.script.serve(whole | {"features.a.values": ids.to("meta")})


def _features(keys: list[str], values: Any, lengths: list[int]) -> recfx.Sample:
    return recfx.Sample(torch.zeros(1, 1), KeyedJaggedTensor(keys, torch.tensor(values), lengths=torch.tensor(lengths)))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (_features(["a", "b", "c"], [1], [1, 0, 0]), "missing_feature"),
        (_features(FEATURES, [1.0], [1, 0, 0, 0]), "wrong_id_dtype"),
        (_features(FEATURES, [1], [2, -1, 0, 0]), "bad_lengths"),
        (_features(FEATURES, [1], [2, 0, 0, 0]), "bad_lengths"),
        (_features(FEATURES, [1], [0, 0, 0, 0]), "bad_lengths"),
        (_features(FEATURES, [1], []), "bad_lengths"),
        (_features(FEATURES, [1], [2**62, 2**62, 2**62, 2**62, 1, 0, 0, 0]), "bad_lengths"),
        (_features(FEATURES, [20], [0, 0, 0, 1]), "id_out_of_range"),
        (_features(FEATURES, [-1], [0, 0, 0, 1]), "id_out_of_range"),
        (recfx.Sample(torch.zeros(1, 1)), "wrong_argument"),
        (recfx.Sample(torch.zeros(1, 1), torch.zeros(1)), "wrong_argument"),
        (recfx.Sample(torch.zeros(1, 1), None, 1), "wrong_argument"),
    ],
)
def test_a_wrong_batch_is_one_clear_error(loaded: recfx.LoadedModel, wrong: recfx.Sample, reason: str) -> None:
    with refused(reason, error=recfx.InputError):
        loaded(*wrong.args)


def test_what_is_no_tensor_and_what_is_misspelt_is_named(loaded: recfx.LoadedModel) -> None:
    dense, features = call(2).args
    ids: Any = features.values().tolist()
    listed = KeyedJaggedTensor(features.keys(), ids, lengths=features.lengths())
    for args, told in (
        (([[1.0]], features), "dense is a list, not a tensor. What to do: pass a tensor of the sample's dtype"),
        ((dense.numpy(), features), "dense is a ndarray, not a tensor"),
        ((dense, listed), "features.values is a list, not a tensor"),
        ((dense, None), "features is None, not a KeyedJaggedTensor"),
        ((dense.to("meta"), features), "dense is on device 'meta', which holds no values"),
        ((dense, features.to("meta")), "features.values is on device 'meta', which holds no values"),
    ):
        with refused("wrong_argument", match=re.escape(told), error=recfx.InputError):
            loaded(*args)


def test_a_loaded_model_stays_in_eval_mode(loaded: recfx.LoadedModel) -> None:
    with refused("cannot_train", error=recfx.ExportError):
        loaded.train()
    assert not loaded.eval()(*call(2).args).requires_grad


def test_a_fresh_process_loads_it_without_the_model(model: nn.Module, file: Path, tmp_path: Path) -> None:
    sample = call(5, seed=9)
    torch.save({**by_name(sample), "wanted": model(*sample.args).detach()}, tmp_path / "batch.pt")
    code = """if True:
        import sys, torch, recfx
        batch = torch.load("batch.pt")
        wanted = batch.pop("wanted")
        assert torch.allclose(recfx.load(sys.argv[1]).serve(batch)["output"], wanted, rtol=1e-5, atol=1e-6)
        assert not [name for name in sys.modules if name.startswith("tests.") and not name.startswith("tests.support")]
    """
    done = run_script(code, str(file), directory=tmp_path)
    assert done.returncode == 0, done.stderr


# Files


def test_damaged_files_and_files_of_later_versions(model: nn.Module, file: Path, tmp_path: Path) -> None:
    path, whole = tmp_path / "model", file.read_bytes()
    at = whole.index(model.linear.weight.detach().numpy().tobytes())
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"", b"PK", whole[:at] + b"\1" + whole[at + 1 :]):
        path.write_bytes(damaged)
        with refused("damaged_file", error=recfx.ExportError):
            recfx.load(path)
    for field, value, reason in (("format_version", 4, "newer_format"), ("hash_version", 9, "other_hash")):
        rewrite(file, path, with_manifest(**{field: value}))
        with refused(reason, error=recfx.ExportError):
            recfx.load(path)


@pytest.mark.parametrize(
    ("reason", "more"),
    [
        ("bad_lengths", {"stride_per_key_per_rank": [[2], [2], [3], [1]]}),
        ("inverse_indices", {"inverse_indices": (FEATURES, torch.tensor([[1, 0]] * 4))}),
    ],
)
def test_batches_are_not_expanded(loaded: recfx.LoadedModel, reason: str, more: dict[str, Any]) -> None:
    features = KeyedJaggedTensor(FEATURES, torch.tensor([1, 2]), lengths=torch.tensor([1, 1, *[0] * 6]), **more)
    with refused(reason, error=recfx.InputError):
        loaded(torch.zeros(2, 1), features)


@pytest.mark.parametrize(
    "cached", [{"stride": 4}, {"length_per_key": [3, 1, 0, 0]}, {"offset_per_key": [0, 3, 4, 4, 4]}]
)
def test_what_a_batch_says_of_its_lengths_is_not_believed(loaded: recfx.LoadedModel, cached: dict[str, Any]) -> None:
    ids, lengths, dense = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 1, 2, 0, 0, 0, 0, 0]), torch.zeros(2, 1)
    features = KeyedJaggedTensor(FEATURES, ids, lengths=lengths, **cached)
    assert torch.equal(loaded(dense, features), loaded(dense, KeyedJaggedTensor(FEATURES, ids, lengths=lengths)))


@pytest.mark.parametrize("change", [swapped, with_another, without_one])
def test_records_that_belong_to_another_file_are_refused(change: ChangeRecords, file: Path, tmp_path: Path) -> None:
    rewrite(file, tmp_path / "changed", change)
    with pytest.raises(
        recfx.ExportError, match="its records are not those that its manifest was written for"
    ) as raised:
        recfx.load(tmp_path / "changed")
    assert raised.value.reason == "damaged_file"


def test_a_file_may_be_packed_again(model: nn.Module, loaded: recfx.LoadedModel, file: Path, tmp_path: Path) -> None:
    """In another order, and without the records that name the sources."""

    def change(records: Records) -> Records:
        return {name: records[name] for name in reversed(records) if not name.endswith(".debug_pkl")}

    rewrite(file, tmp_path / "packed", change)
    sample = call(5, seed=9)
    assert torch.equal(recfx.load(tmp_path / "packed")(*sample.args), loaded(*sample.args))


class _Switched(nn.Module):
    """A layer that does something else in training, which only its own ``train`` says."""

    def train(self, mode: bool = True) -> nn.Module:
        self.scale = 3.0 if mode else 1.0
        return super().train(mode)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        return pooled * self.scale


class _HasSwitched(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.switched = model, _Switched()

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.switched(self.model(dense, features))


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_eval_mode_is_what_the_users_train_makes_of_it(
    model_of: dict[bool, nn.Module], options: dict[str, Any], tmp_path: Path
) -> None:
    model = _HasSwitched(copy.deepcopy(model_of[False])).train()
    recfx.export(model, tmp_path / "model", call(6), **options)
    assert model.switched.scale == 3.0
    torch.testing.assert_close(
        recfx.load(tmp_path / "model")(*call(5, seed=9).args), model.eval()(*call(5, seed=9).args)
    )
