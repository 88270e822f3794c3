"""Every model of ``torchrec.distributed.test_utils.test_model`` that runs eagerly on one device."""

from typing import Any

import torch
from torch import nn
from torchrec.distributed.test_utils.test_model import (
    ModelInput,
    TestModelWithPreproc,
    TestModelWithPreprocCollectionArgs,
    TestNegSamplingModule,
    TestOverArchLarge,
    TestPositionWeightedPreprocModule,
    TestSparseNN,
    TestTowerCollectionSparseNN,
    TestTowerSparseNN,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType

from recfx.models.sample import Sample
from tests.builders.batches import batch
from tests.builders.collections import ROWS, table
from tests.models.case import Case
from tests.support.needs import needed

_DENSE = 10  # the test models' default
_CPU = torch.device("cpu")
_TEST_MODEL = "torchrec.distributed.test_utils.test_model"
TestEBCSparseArch = needed(f"{_TEST_MODEL}.TestEBCSparseArch", "TorchRec 1.4")
TestMixedEmbeddingSparseArch = needed(f"{_TEST_MODEL}.TestMixedEmbeddingSparseArch", "TorchRec 1.4")
TestMixedSequenceOverArch = needed(f"{_TEST_MODEL}.TestMixedSequenceOverArch", "TorchRec 1.4")


def _tables() -> list[EmbeddingBagConfig]:
    return [
        table(f"table_{i}", [f"feature_{i}"], dim=4 + 2 * i, pooling=PoolingType.MEAN if i % 2 else PoolingType.SUM)
        for i in range(4)
    ]


def _weighted_tables() -> list[EmbeddingBagConfig]:
    return [table(f"weighted_table_{i}", [f"weighted_feature_{i}"], dim=4) for i in range(2)]


def _input(batch_size: int, tables: int = 4) -> ModelInput:
    return ModelInput(
        float_features=torch.rand(batch_size, _DENSE),
        idlist_features=batch(batch_size, [f"feature_{i}" for i in range(tables)]),
        idscore_features=batch(batch_size, [f"weighted_feature_{i}" for i in range(2)], weighted=True),
        label=torch.rand(batch_size),
    )


def _call(batch_size: int) -> Sample:
    return Sample(_input(batch_size))


def _sparse_nn(**options: Any) -> nn.Module:
    return TestSparseNN(tables=_tables(), weighted_tables=_weighted_tables(), **options)


class _AddFeatures(nn.Module):
    """Negative sampling as ``TestNegSamplingModule`` does it, for any batch size: more features join the batch."""

    def forward(self, input: ModelInput) -> ModelInput:
        features = input.idlist_features
        more = type(features)(
            [f"{key}_negative" for key in features.keys()],  # noqa: SIM118
            ROWS - 1 - features.values(),
            lengths=features.lengths(),
            stride=features.stride(),
        )
        return ModelInput(
            input.float_features, type(features).concat([features, more]), input.idscore_features, input.label
        )


class _FixedNegatives(nn.Module):
    """``TestNegSamplingModule`` itself, fed an extra batch of the size it is called with."""

    def __init__(self, has_params: bool) -> None:
        super().__init__()
        self.of_size = nn.ModuleDict(
            {str(size): TestNegSamplingModule(_extra_input(size), has_params) for size in (4, 5, 7)}
        )

    def forward(self, input: ModelInput) -> ModelInput:
        joined = self.of_size[str(input.float_features.size(0))](input)
        size = input.float_features.size(0)
        return ModelInput(
            joined.float_features[:size], joined.idlist_features, joined.idscore_features, joined.label[:size]
        )


def _extra_input(batch_size: int) -> ModelInput:
    return ModelInput(
        float_features=torch.rand(batch_size, _DENSE),
        idlist_features=batch(batch_size, ["extra_feature"]),
        idscore_features=batch(batch_size, ["extra_weighted_feature"], weighted=True),
        label=torch.rand(batch_size),
    )


class _Nested(nn.Module):
    """The nested step of ``TestModelWithPreprocCollectionArgs``: takes the input, a list and a dict."""

    def forward(self, input: ModelInput, items: list[Any], named: dict[str, Any]) -> ModelInput:
        return ModelInput(
            input.float_features + items[0] + named["const"],
            named["tensor_from_postproc"].idlist_features,
            input.idscore_features,
            input.label,
        )


class _SparseArchAlone(nn.Module):
    """The sparse architecture alone, its KeyedTensor given out."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = TestEBCSparseArch(_tables(), _weighted_tables())

    def forward(self, input: ModelInput) -> Any:
        return self.sparse(input.idlist_features, input.idscore_features)


def _mixed() -> nn.Module:
    sequences = [EmbeddingConfig(name="sequence", feature_names=["feature_3"], embedding_dim=4, num_embeddings=ROWS)]
    return TestMixedEmbeddingSparseArch(tables=[*_tables()[:3], *sequences], over_arch_clazz=TestMixedSequenceOverArch)


_ONE_GROUP = {"group": ["feature_0", "feature_1", "feature_2", "feature_3"]}

TORCHREC_TEST_MODELS = [
    Case("sparse_nn", _sparse_nn, _call),
    Case("sparse_nn_groups", lambda: _sparse_nn(embedding_groups=_ONE_GROUP), _call),
    Case("sparse_nn_over_large", lambda: _sparse_nn(over_arch_clazz=TestOverArchLarge), _call),
    Case("sparse_nn_feature_processor", lambda: _feature_processed(), _call),
    Case("sparse_nn_position_weighted", lambda: _position_weighted(), _call),
    Case("sparse_nn_negatives", lambda: _sparse_nn(postproc_module=_FixedNegatives(False)), _call),
    Case("sparse_nn_negatives_with_parameters", lambda: _sparse_nn(postproc_module=_FixedNegatives(True)), _call),
    Case("sparse_arch", _SparseArchAlone, _call),
    Case("tower_sparse_nn", lambda: TestTowerSparseNN(tables=_tables(), weighted_tables=_weighted_tables()), _call),
    Case(
        "tower_collection_sparse_nn",
        lambda: TestTowerCollectionSparseNN(tables=_tables()[:3], weighted_tables=_weighted_tables()),
        _call,
    ),
    Case("preprocessing_module", lambda: _preprocessing(postproc_module=_AddFeatures()), _call),
    Case(
        "preprocessing_collections",
        lambda: TestModelWithPreprocCollectionArgs(
            tables=_tables()[:3],
            weighted_tables=_weighted_tables()[:1],
            device=_CPU,
            postproc_module_outer=_AddFeatures(),
            postproc_module_nested=_Nested(),
        ),
        _call,
    ),
    Case("mixed_with_sequences", _mixed, _call),
]


def _feature_processed() -> nn.Module:
    """Some tables behind position weights; TorchRec finds them by table name, which has to be the feature's as well."""
    tables = [*_tables()[:2], *(table(f"feature_{i}", [f"feature_{i}"], dim=6) for i in (2, 3))]
    # The processor runs over the whole batch, so that it wants a length for every feature, with a table or not.
    model = TestSparseNN(
        tables=tables, weighted_tables=_weighted_tables(), max_feature_lengths={f"feature_{i}": 6 for i in range(4)}
    )
    for weight in model.sparse.fp_ebc._feature_processors.position_weights.values():
        nn.init.uniform_(weight)
    return model


def _position_weighted() -> nn.Module:
    return _sparse_nn(
        postproc_module=TestPositionWeightedPreprocModule({f"feature_{i}": 6 for i in range(4)}, device=_CPU)
    )


def _preprocessing(**options: Any) -> nn.Module:
    return TestModelWithPreproc(tables=_tables()[:3], weighted_tables=_weighted_tables()[:1], device=_CPU, **options)
