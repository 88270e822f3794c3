"""The models of ``torchrec.models``; wrappers that call them otherwise are left out."""

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain
from torchrec.models.experimental.transformerdlrm import DLRM_Transformer

from recfx.models.sample import Sample
from tests.builders.batches import batch
from tests.builders.collections import collection
from tests.models.case import Case

_DENSE = 5


def _positional(batch_size: int) -> Sample:
    return Sample(torch.rand(batch_size, _DENSE), batch(batch_size))


def _batch(batch_size: int) -> Sample:
    labels = torch.randint(0, 2, (batch_size,))
    return Sample(Batch(torch.rand(batch_size, _DENSE), batch(batch_size), labels))


def _dlrm(kind: type[DLRM], **options: object) -> nn.Module:
    return kind(
        embedding_bag_collection=collection(),
        dense_in_features=_DENSE,
        dense_arch_layer_sizes=[6, 8],
        over_arch_layer_sizes=[5, 1],
        **options,
    )


def _deep_fm() -> nn.Module:
    return SimpleDeepFMNN(
        num_dense_features=_DENSE, embedding_bag_collection=collection(), hidden_layer_size=6, deep_fm_dimension=4
    )


def _projection() -> nn.Module:
    return _dlrm(DLRM_Projection, interaction_branch1_layer_sizes=[6, 16], interaction_branch2_layer_sizes=[6, 16])


TORCHREC_MODELS = [
    Case("dlrm", lambda: _dlrm(DLRM), _positional),
    Case("dlrm_by_name", lambda: _dlrm(DLRM), lambda b: _by_name(_positional(b))),
    Case("dlrm_dcn", lambda: _dlrm(DLRM_DCN, dcn_num_layers=2, dcn_low_rank_dim=4), _positional),
    Case("dlrm_projection", _projection, _positional),
    Case("dlrm_transformer", lambda: _dlrm(DLRM_Transformer, nhead=2, ntransformer_layers=1), _positional),
    Case("dlrm_train", lambda: DLRMTrain(_dlrm(DLRM)), _batch),
    Case("deep_fm", _deep_fm, _positional),
]


def _by_name(call: Sample) -> Sample:
    dense, sparse = call.args
    return Sample(dense_features=dense, sparse_features=sparse)
