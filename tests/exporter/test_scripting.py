"""torch's compilers and TorchRec's quantization refuse converted models, and say what to call."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.inference.modules import quantize_embeddings, quantize_inference_model
from torchrec.modules import fused_embedding_modules

import recfx
from tests.exporter.hashed_models import HashedModel, call, trained
from tests.support.refusals import refused


@pytest.fixture
def model() -> nn.Module:
    return trained()


@pytest.mark.parametrize(
    "trace",
    [
        lambda model: model,
        lambda model: recfx.trace(model, call(6, low=0)),
        lambda model: recfx.convert(model, call(6, low=0), whole_graph=True),
    ],
)
def test_torch_compiles_no_converted_model(model: nn.Module, trace: Callable[[nn.Module], nn.Module]) -> None:
    taken, sample = trace(model), call(6, low=0)
    with refused("not_scriptable", "ebc", error=recfx.ExportError) as caught:
        torch.jit.script(taken)
    assert "recfx.export" in caught.value.what_to_do
    for strict in (False, True):
        with refused("not_exportable", "ebc", error=recfx.ExportError) as caught:
            torch.export.export(taken, sample.args, strict=strict)
        assert 'format="pt2"' in caught.value.what_to_do


def test_other_models_are_compiled_as_ever() -> None:
    sample = call(3, low=0)
    assert torch.jit.script(HashedModel())(*sample.args).shape == (3, 2)
    plain = HashedModel()
    answer = torch.export.export(plain, call(3, low=0).args).module()(*sample.args)
    torch.testing.assert_close(answer, plain(*sample.args))


# Quantization


def _by_class(model: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(model, {EmbeddingBagCollection: torch.ao.quantization.QConfig(1, 1)})


def _by_class_imported_before(model: nn.Module) -> nn.Module:
    quantize = inspect.unwrap(torch.ao.quantization.quantize_dynamic)
    return quantize(model, {EmbeddingBagCollection: torch.ao.quantization.QConfig(1, 1)})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "quantize",
    [
        lambda model: quantize_embeddings(model, dtype=torch.qint8, inplace=False),
        lambda model: quantize_embeddings(module=model, dtype=torch.qint8, inplace=True),
        quantize_inference_model,
        _by_class,
        _by_class_imported_before,
    ],
)
def test_torchrecs_quantization_of_a_converted_model_says_what_to_call(
    model: nn.Module, quantize: Callable[[nn.Module], nn.Module]
) -> None:
    with refused("not_quantized", "ebc", match=r"recfx\.export.*recfx\.unconvert", error=recfx.ExportError):
        quantize(model)


def test_torchrecs_fused_collections_do_not_replace_converted_ones(model: nn.Module) -> None:
    """They have neither rows nor an index of those that they replace."""
    fuse = fused_embedding_modules.fuse_embedding_optimizer
    with refused("not_fusable", "ebc", match="apply_optimizer_in_backward", error=recfx.ExportError):
        fuse(model, torch.optim.SGD, {"lr": 0.1}, torch.device("cpu"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_dense_part_of_a_converted_model_is_quantized_as_ever(model: nn.Module) -> None:
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert type(quantized.linear) is not nn.Linear
    assert type(quantized.ebc) is type(model.ebc)
    with torch.no_grad():
        difference = (quantized(*call(4).args) - model(*call(4).args)).abs().max()
    assert 0 < float(difference) < 0.1
