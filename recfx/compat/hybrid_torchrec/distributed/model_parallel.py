"""``DistributedModelParallel``: TorchRec's class, to which every device is the same."""

from torchrec.distributed.model_parallel import DistributedModelParallel

__all__ = ["DistributedModelParallel"]
