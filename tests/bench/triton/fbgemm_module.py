"""FBGEMM's own module on the device of a workload; imported only where FBGEMM has kernels for it."""

from __future__ import annotations

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from tests.bench.triton.on_device import Workload

RULES = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
}


def table_batched(
    workload: Workload, weights: list[torch.Tensor], rule: str, learning_rate: float = 0.0, eps: float = 0.0
) -> SplitTableBatchedEmbeddingBagsCodegen:
    """The module with copies of the weights, as TorchRec's fused kernel builds it, including its bounds check."""
    on_cuda = workload.device.type == "cuda"
    place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if on_cuda else (EmbeddingLocation.HOST, ComputeDevice.CPU)
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(weight.shape[0], weight.shape[1], *place) for weight in weights],
        optimizer=RULES[rule],
        pooling_mode=PoolingMode.SUM,
        learning_rate=learning_rate,
        eps=eps,
        device=workload.device,
    )
    with torch.no_grad():
        for mine, theirs in zip(weights, module.split_embedding_weights(), strict=True):
            theirs.copy_(mine)
    return module
