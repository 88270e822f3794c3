"""Whole models on target ``triton``: against the standard model, and hashed ones against another target."""

import copy
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

import recfx
from recfx.ir import format_graph
from tests.builders.collections import collection, sequences
from tests.builders.optimizers import OPTIMIZERS, attach
from tests.models import ZOO
from tests.models.case import tensors_in

MODELS = (
    "dlrm", "deep_fm", "sparse_nn_position_weighted", "tower_sparse_nn", "din", "hstu", "sequence_tied_to_pooled",
)  # fmt: skip
HASHING = {
    "raw": recfx.HashConfig(dense_rows=0),
    "lru": recfx.HashConfig(dense_rows=0, on_full="evict"),
    "admit_share": recfx.HashConfig(dense_rows=0, admit_after=2, unseen="share"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_the_standard_ones(name: str) -> None:
    case = next(case for case in ZOO if case.name == name)
    standard = case.model()
    converted = recfx.convert(case.model(), backend="triton")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (standard, converted)]
    for size in (4, 7, 3):
        outputs = []
        for model, optimizer in zip((standard, converted), optimizers, strict=True):
            sample = case.sample(size)
            answers = list(tensors_in(model(*sample.args, **sample.kwargs)))
            optimizer.zero_grad()
            sum(answer.float().square().mean() for answer in answers if answer.is_floating_point()).backward()
            optimizer.step()
            outputs.append(answers)
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
    theirs = standard.state_dict()
    for key, value in recfx.unconvert(converted).state_dict().items():
        torch.testing.assert_close(value, theirs[key], rtol=1e-4, atol=1e-5)


def batch(seed: int, ids: int) -> KeyedJaggedTensor:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (3 * 6,), generator=draw)
    values = torch.randint(0, ids, (int(lengths.sum()),), generator=draw) * 1_000_003 - 7
    return KeyedJaggedTensor(["f1", "f2", "f3"], values, lengths=lengths)


@pytest.mark.parametrize("hashing", HASHING)
@pytest.mark.parametrize(
    ("build", "optimizer"), [*product([collection], OPTIMIZERS), *product([sequences], ["adagrad", "adam"])]
)
def test_hashed_collections_train_as_on_another_target(
    build: Callable[[], nn.Module], optimizer: str, hashing: str
) -> None:
    """Index, weights and optimizer state after six steps, with ids that are new, evicted and not admitted.

    Some keys of sequences are not used.
    """
    torch.manual_seed(0)
    plain = build()
    models = []
    for backend in ("reference", "triton"):
        model = copy.deepcopy(plain)
        attach(model, optimizer)
        models.append(recfx.convert(model, hashing=HASHING[hashing], backend=backend))
        assert f"kernel={backend}" in format_graph(models[-1].graph_module)
    for step in range(6):
        outputs = []
        for model in models:
            answers = [answer.flatten() for answer in tensors_in(model(batch(step, 15))) if answer.requires_grad]
            output = torch.cat(answers[step % len(answers) :])
            (output - torch.linspace(-1, 1, output.numel())).square().sum().backward()
            outputs.append(output.detach())
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
    first, second = (model.state_dict() for model in models)
    assert first.keys() == second.keys()
    for key, value in first.items():
        torch.testing.assert_close(second[key], value, rtol=1e-4, atol=1e-5)
    for model in models:
        model.eval()
    actual, expected = ([*tensors_in(model(batch(99, 40)))] for model in reversed(models))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_the_graph_and_the_report_name_the_target() -> None:
    converted = recfx.convert(nn.Sequential(collection()), backend="triton")
    assert format_graph(converted[0].graph_module).count("kernel=triton") == 2
    assert "triton" in str(recfx.explain(converted))
