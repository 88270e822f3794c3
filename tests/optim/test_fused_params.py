"""TorchRec's ``fused_params`` as fused optimizers: what is carried out, and what is refused."""

import copy
import pickle
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

import recfx
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.fused_params import fused_optimizer_from_params, weight_decay_left_out
from recfx.optim.rules.adagrad import ADAGRAD
from recfx.optim.rules.adam import ADAM, PARTIAL_ROWWISE_ADAM
from recfx.optim.rules.lamb import LAMB
from recfx.optim.rules.lars_sgd import LARS_SGD
from recfx.optim.rules.rowwise_adagrad import ROWWISE_ADAGRAD, ROWWISE_ADAGRAD_DECOUPLED
from recfx.optim.rules.rule import ANY_MODE, Rule
from recfx.optim.rules.sgd import SGD
from tests.support.refusals import refused

LAMB_GROUP = {"lr": 0.01, "eps": 1e-8, "betas": (0.9, 0.999), "weight_decay": 0.0}


@pytest.mark.parametrize(
    ("params", "rule", "group"),
    [
        ({}, SGD, {"lr": 0.01, "weight_decay": 0.0}),
        ({"optimizer": EmbOptimType.EXACT_ADAGRAD}, ADAGRAD, {"lr": 0.01, "eps": 1e-8, "weight_decay": 0.0}),
        (
            {"optimizer": EmbOptimType.ROWWISE_ADAGRAD, "eps": 0.1, "learning_rate": torch.tensor(0.5)},
            ROWWISE_ADAGRAD,
            {"lr": 0.5, "eps": 0.1, "weight_decay": 0.0},
        ),
        (
            {
                "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
                "weight_decay": 0.25,
                "weight_decay_mode": WeightDecayMode.DECOUPLE,
            },
            ROWWISE_ADAGRAD_DECOUPLED,
            {"lr": 0.01, "eps": 1e-8, "weight_decay": 0.25},
        ),
        (
            {"optimizer": EmbOptimType.PARTIAL_ROWWISE_ADAM, "weight_decay": 0.25},
            PARTIAL_ROWWISE_ADAM,
            {"lr": 0.01, "eps": 1e-8, "betas": (0.9, 0.999), "weight_decay": 0.25},
        ),
        (
            {"optimizer": EmbOptimType.LAMB, "weight_decay": 0.25, "weight_decay_mode": WeightDecayMode.L2},
            LAMB,
            {**LAMB_GROUP, "weight_decay": 0.25},
        ),
        (
            {"optimizer": EmbOptimType.LARS_SGD, "eta": 0.5, "momentum": 0.0},
            LARS_SGD,
            {"lr": 0.01, "eta": 0.5, "momentum": 0.0, "weight_decay": 0.0},
        ),
        (
            {"optimizer": EmbOptimType.ADAM, "beta1": 0.5},
            ADAM,
            {"lr": 0.01, "eps": 1e-8, "betas": (0.5, 0.999), "weight_decay": 0.0},
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Rule) else "",
)
def test_optimizers(params: dict[str, Any], rule: Rule, group: dict[str, Any]) -> None:
    before = dict(params)
    assert fused_optimizer_from_params(params) == FusedOptimizer(rule, group)
    assert params == before


@pytest.mark.parametrize(
    ("optimizer", "modes"),
    [
        (EmbOptimType.EXACT_SGD, (None, *ANY_MODE)),
        (EmbOptimType.EXACT_ADAGRAD, (None, *ANY_MODE)),
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, (None, WeightDecayMode.NONE)),
    ],
)
def test_weight_decay_that_fbgemm_does_not_apply(optimizer: EmbOptimType, modes: tuple[WeightDecayMode, ...]) -> None:
    applies_in_some_mode = optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD
    for mode in modes:
        params = {"optimizer": optimizer, "weight_decay": 0.25, "weight_decay_mode": mode}
        fused = fused_optimizer_from_params(params)
        assert (fused.group["weight_decay"], fused.left_out) == (0.0, 0.25)
        assert copy.deepcopy(fused).left_out == pickle.loads(pickle.dumps(fused)).left_out == 0.25
        assert ("in this weight_decay_mode" in weight_decay_left_out(fused, "t").message) == applies_in_some_mode
    none_asked_for = {"optimizer": optimizer, "weight_decay_mode": WeightDecayMode.DECOUPLE}
    assert fused_optimizer_from_params(none_asked_for).left_out == 0.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("momentum", 0.0),
        ("max_gradient", 1.0),
        ("output_dtype", SparseType.FP32),
        ("bounds_check_mode", BoundsCheckMode.WARNING),
        ("anything", None),
    ],
)
def test_entries_that_change_nothing(name: str, value: object) -> None:
    assert fused_optimizer_from_params({name: value}) == fused_optimizer_from_params({})


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"optimizer": EmbOptimType.MADGRAD}, "EXACT_ROWWISE_ADAGRAD"),
        ({"optimizer": EmbOptimType.LAMB, "momentum": 0.9}, "momentum=0.9"),
        ({"optimizer": EmbOptimType.LARS_SGD, "eta": -1.0}, "not negative"),
        (
            {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "weight_decay_mode": WeightDecayMode.COUNTER},
            "WeightDecayMode.L2, WeightDecayMode.DECOUPLE",
        ),
        ({"optimizer": torch.optim.SGD}, "EmbOptimType.ADAM"),
        ({"lr": 0.1}, "learning_rate"),
        ({"momentum": 0.9}, "momentum=0.9"),
        ({"gradient_clipping": True}, "gradient_clipping"),
        ({"optimizer": EmbOptimType.ADAM, "weight_decay": 0.1}, "AdamW"),
        ({"learning_rate": -1.0}, "not negative"),
        ({"optimizer": EmbOptimType.ADAM, "beta2": 1.0}, "less than 1"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_refused(params: dict[str, Any], says: str) -> None:
    with refused("unsupported_fused_param", match=says):
        fused_optimizer_from_params(params)
    with pytest.raises(recfx.ConversionError, match=says):
        recfx.sharders(fused_params=params)
