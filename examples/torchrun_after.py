"""torchrun --nproc-per-node 2 examples/torchrun_after.py"""

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from two_tower import TwoTower, batches

import recfx

dist.init_process_group("gloo")
torch.manual_seed(0)
model = TwoTower()
model = recfx.convert(model)
apply_optimizer_in_backward(torch.optim.Adagrad, model.ebc.parameters(), {"lr": 0.2})
model = DistributedModelParallel(model, device=torch.device("cpu"))
dense = dict(in_backward_optimizer_filter(model.named_parameters()))
optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adam(parameters, lr=0.01))
for features, labels in batches(dist.get_rank()):
    loss = binary_cross_entropy_with_logits(model(features), labels)
    optimizer.zero_grad()
    loss.backward()  # the tables take their step in here
    optimizer.step()
print(f"rank {dist.get_rank()}: loss {loss:.6f}")
dist.destroy_process_group()
