"""The names of Rec SDK Torch's ``hybrid_torchrec``: its quick start runs with the import lines changed.

Submodules are where theirs are: put ``recfx.compat.`` in front of every ``hybrid_torchrec`` in an import. What Rec SDK
Torch gets by patching TorchRec is here, as recfx leaves TorchRec alone: ``DistributedModelParallel``, and ``Topology``
with its ``EmbeddingShardingPlanner``, which know the device ``npu``.

What is refused there for want of a kernel and works here (all sharding types, any dim and data type, ids of all 64
bits) is not refused. There is no ``hashing`` in a config: raw ids are spread over all ``num_embeddings`` rows.
Nothing in here has run on an NPU.
"""

from recfx.compat.hybrid_torchrec.distributed.hybrid_train_pipeline import HybridTrainPipelineSparseDist
from recfx.compat.hybrid_torchrec.distributed.model_parallel import DistributedModelParallel
from recfx.compat.hybrid_torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from recfx.compat.hybrid_torchrec.distributed.sharding_plan import get_default_hybrid_sharders
from recfx.compat.hybrid_torchrec.modules.hash_embeddingbag import HashEmbeddingBagCollection, HashEmbeddingBagConfig

__all__ = [
    "DistributedModelParallel",
    "EmbeddingShardingPlanner",
    "HashEmbeddingBagCollection",
    "HashEmbeddingBagConfig",
    "HybridTrainPipelineSparseDist",
    "Topology",
    "get_default_hybrid_sharders",
]
