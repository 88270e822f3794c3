"""``torch.export`` of converted models and of their graphs, as users call it."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchrec.fx
from torch import nn
from torch.export import Dim
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import recfx
from recfx.exporter import torch_entry
from recfx.versions.differences import strict_export_runs_hooks
from tests.builders.batches import one_bag
from tests.builders.collections import one_table
from tests.exporter.hashed_models import FEATURES, TRACES, HashedModel, call, trained
from tests.sharding.ranks import ranks
from tests.support.needs import needed
from tests.support.refusals import refused

WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    **TRACES,
    "a new wrapper": lambda model: nn.ModuleList([OfTensors(model)])[0],
}


class OfTensors(nn.Module):
    """Takes the tensors of its batch, so that their sizes can be named; it is in training mode, which nobody set."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
        if isinstance(features, tuple):
            ids, lengths, *weights = features
            features = KeyedJaggedTensor(FEATURES, ids, *weights, lengths=lengths)
        return self.inner(dense, features)


def tensors(sample: recfx.Sample) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    dense, features = sample.args
    weights = features.weights_or_none()
    return dense, (features.values(), features.lengths(), *([] if weights is None else [weights]))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_the_program_answers_as_the_model_does(way: str, strict: bool) -> None:
    model, sample = trained(), call(6, seed=9)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    taken = WAYS[way](model)
    modules = {name: id(module) for name, module in taken.named_modules()}
    program = torch.export.export(taken, sample.args, strict=strict)
    torch.testing.assert_close(program.module()(*sample.args), model(*sample.args), rtol=1e-5, atol=1e-6)
    assert {name: id(module) for name, module in taken.named_modules()} == modules
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_saved_programs_take_batches_of_every_size(tmp_path: Path) -> None:
    """Also of ids that they do not know; torch and FBGEMM load them."""
    least, most, changes = -(2**63), 2**63 - 1, {0: Dim.DYNAMIC}
    for number, (hashed, is_weighted) in enumerate(itertools.product([False, True], repeat=2)):
        model = trained(is_weighted) if hashed else recfx.convert(HashedModel(is_weighted)).eval()
        sample = tensors(call(6, low=0, is_weighted=is_weighted))
        shapes = (changes, (changes,) * len(sample[1]))
        program = torch.export.export(OfTensors(model), sample, dynamic_shapes=shapes, strict=hashed == is_weighted)
        torch.export.save(program, tmp_path / f"{number}.pt2")
        ranges = [(least, most), (-20, 20)] if hashed else [(0, 20)]
        batches = [call(size, 9, low, high, is_weighted) for size in (2, 9, 40) for low, high in ranges]
        torch.save([(tensors(sample), model(*sample.args)) for sample in batches], tmp_path / f"{number}.pt")
    subprocess.run([sys.executable, "-c", _IN_ANOTHER_PROCESS, str(tmp_path)], check=True, timeout=300)


_IN_ANOTHER_PROCESS = """
import sys, torch, fbgemm_gpu
for number in range(4):
    program = torch.export.load(f"{sys.argv[1]}/{number}.pt2").module()
    for batch, answer in torch.load(f"{sys.argv[1]}/{number}.pt"):
        torch.testing.assert_close(program(*batch), answer, rtol=1e-5, atol=1e-6)
assert "recfx" not in sys.modules
"""


def test_a_wrong_batch_is_refused_by_the_program() -> None:
    model = recfx.convert(nn.Sequential(one_table())).eval()
    program = torch.export.export(model, (one_bag(1, 2),)).module()
    with pytest.raises(RuntimeError, match=r"id_out_of_range"):
        program(one_bag(1, 10))


class Sub(EmbeddingBagCollection):
    def width(self) -> int:
        return sum(config.embedding_dim for config in self.embedding_bag_configs())


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = Sub([EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=10, feature_names=["f"])])
        self.ebc.scale = 3.0
        self.ebc.after = nn.Linear(4, 4)
        self.ebc.register_forward_hook(lambda _, inputs, pooled: pooled.values() * 2)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        after = self.ebc.after(self.ebc(features)) * self.ebc.width() * self.ebc.scale
        return after + torch.ones(1, device=self.ebc.device)


@pytest.mark.parametrize("strict", [False, True])
def test_a_model_that_asks_its_collection_for_more(strict: bool) -> None:
    if strict and not strict_export_runs_hooks():
        pytest.skip("needs torch 2.10, whose strict export runs hooks")
    plain, sample = Asks().eval(), (one_bag(1, 2),)
    program = torch.export.export(recfx.convert(plain), sample, strict=strict)
    torch.testing.assert_close(program.module()(*sample), plain(*sample))


def test_hooks_that_strict_export_would_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_entry, "strict_export_runs_hooks", lambda: False)
    with pytest.raises(recfx.ExportError) as caught:
        torch.export.export(recfx.convert(Asks().eval()), (one_bag(1, 2),), strict=True)
    assert (caught.value.reason, caught.value.module_path) == ("not_exportable", "ebc")
    assert "strict=False" in caught.value.what_to_do


def test_a_collection_by_itself() -> None:
    plain, sample = one_table().eval(), (one_bag(1, 2),)
    answer = torch.export.export(recfx.convert(plain), sample).module()(*sample)
    torch.testing.assert_close(answer.values(), plain(*sample).values())


def test_other_models_are_exported_as_ever() -> None:
    plain, sample = HashedModel(), call(3, low=0)  # which trains
    program = torch.export.export(plain, call(3, low=0).args)  # in whose batch TorchRec 1.2 keeps what is no number
    answer = program.module()(*sample.args)
    torch.testing.assert_close(answer, plain(*sample.args))


def check_refusal(model: nn.Module, reason: str, path: str, what_to_do: str, sample: recfx.Sample) -> None:
    for strict in (False, True):
        with refused(reason, path, error=recfx.ExportError) as caught:
            torch.export.export(model, sample.args, strict=strict)
        assert what_to_do in caught.value.what_to_do
        assert 'recfx.export(model, path, sample, format="pt2")' in caught.value.what_to_do


@pytest.mark.parametrize("way", [way for way in WAYS if way != "a new wrapper"])
def test_in_training_mode_it_says_eval(way: str) -> None:
    model = trained().train()
    taken = WAYS[way](model)
    check_refusal(taken, "training_mode", "ebc", "model.eval()", call(3, low=0))
    if way == "recfx.trace":  # its code stays that of training mode
        check_refusal(taken.eval(), "training_mode", "", "recfx.trace", call(3, low=0))


def test_tables_that_are_not_on_the_cpu() -> None:
    converted = recfx.convert(HashedModel().to("meta"), device="meta").eval()
    sample = recfx.Sample(*(argument.to("meta") for argument in call(3, low=0).args))
    with refused("not_exportable", "ebc", match="on meta", error=recfx.ExportError):
        torch.export.export(converted, sample.args)


def test_a_draft_is_referred_to_export() -> None:
    draft_export = needed("torch.export.draft_export", "torch 2.8")
    with refused("not_exportable", "ebc", match=r"draft_export", error=recfx.ExportError):
        draft_export(trained(), call(3, low=0).args)
    sample = call(3, low=0)
    draft_export(HashedModel(), sample.args)


def _export_sharded(rank: int, world_size: int) -> None:
    converted = recfx.convert(nn.Sequential(one_table()))
    parallel = torchrec.distributed.DistributedModelParallel(converted, device=torch.device("cpu"))
    check_refusal(parallel.module.eval(), "not_exportable", "0", "on every rank", recfx.Sample(one_bag(1)))


def test_a_sharded_model_is_referred_to_recfx_export() -> None:
    ranks(2).run(_export_sharded)
