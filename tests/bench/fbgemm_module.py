"""FBGEMM's own module, as TorchRec's fused kernel builds it, including its bounds check; devices may lack it."""

from collections.abc import Sequence

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

RULES = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,  # not on the CPU
}


def table_batched(
    weights: Sequence[torch.Tensor], rule: str, learning_rate: float = 0.0, eps: float = 0.0, pooling: str = "SUM"
) -> SplitTableBatchedEmbeddingBagsCodegen:
    """The module with copies of the weights, on their device."""
    device = weights[0].device
    on_cuda = device.type == "cuda"
    place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if on_cuda else (EmbeddingLocation.HOST, ComputeDevice.CPU)
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(weight.shape[0], weight.shape[1], *place) for weight in weights],
        weights_precision=SparseType.FP16 if weights[0].dtype == torch.float16 else SparseType.FP32,
        output_dtype=SparseType.FP32,
        optimizer=RULES[rule],
        pooling_mode=PoolingMode[pooling],
        learning_rate=learning_rate,
        eps=eps,
        device=device,
    )
    with torch.no_grad():
        for mine, theirs in zip(weights, module.split_embedding_weights(), strict=True):
            theirs.copy_(mine)
    return module
