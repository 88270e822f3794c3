# %% [markdown]
# # TorchRec's introduction, with recfx
#
# The nine steps of TorchRec's own introduction, from an `EmbeddingBag` to a quantized file, on a converted model that
# takes raw 64-bit ids. Every cell is run in the tests. Outside a notebook:
#
# ```
# python examples/torchrec_tour.py                                   # also with --device npu:0 or cuda:0
# torchrun --nproc-per-node 2 examples/torchrec_tour.py
# ```

# %%
import os

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from processes import asked_device, in_order, join_group, print_once, quiet, topology
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import recfx
from recfx.ir import format_graph

quiet()
device = asked_device()  # the CPU, where no other is asked for
torch.manual_seed(0)
print_once("tables are on the", device)

# %% [markdown]
# ## 1. EmbeddingBag
#
# PyTorch's `EmbeddingBag` looks up the rows of a bag of ids and adds them up. An id is the number of a row, so raw ids,
# which have 64 bits, cannot be looked up.

# %%
bag = torch.nn.EmbeddingBag(num_embeddings=16384, embedding_dim=16, mode="sum")
pooled = bag(torch.tensor([101, 7, 42]), offsets=torch.tensor([0, 2]))
print_once("two bags, [101, 7] and [42]:", tuple(pooled.shape))
try:
    bag(torch.tensor([7_000_000_000]), offsets=torch.tensor([0]))
except (IndexError, RuntimeError):
    print_once("7000000000 is refused: there is no such row")

# %% [markdown]
# ## 2. EmbeddingBagCollection
#
# TorchRec's collection has many tables. `recfx.convert` makes a graph of explicit nodes of it, here with an index for
# each table, which gives every raw id a row. The model stays as it is.


# %%
class Model(torch.nn.Module):
    """Two towers, and how well they match; it does not know recfx."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"{name}_table", num_embeddings=16384, embedding_dim=16, feature_names=[name])
            for name in ("product", "user")
        ]
        self.ebc = EmbeddingBagCollection(tables)
        self.over = torch.nn.Linear(16, 16)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(features)
        return (pooled["product"] * self.over(pooled["user"])).sum(dim=1)


RAW_IDS = recfx.HashConfig.raw_ids()
model = recfx.convert(Model(), hashing=RAW_IDS, device=device)
print_once(f"its collection is a {type(model.ebc).__name__} now:")
print_once(format_graph(model.ebc.graph_module))

# %% [markdown]
# ## 3. JaggedTensor and KeyedJaggedTensor
#
# The bags of a feature are a `JaggedTensor`; those of all features are a `KeyedJaggedTensor`.

# %%
jagged = JaggedTensor(values=torch.tensor([101, -(2**63), 7_000_000_000]), lengths=torch.tensor([2, 1]))
print_once("bags of a feature:", [bag.tolist() for bag in jagged.to_dense()])
features = KeyedJaggedTensor(
    keys=["product", "user"],
    values=torch.tensor([101, -(2**63), 7_000_000_000, 42]),
    lengths=torch.tensor([2, 0, 1, 1]),
).to(device)
for feature, bags in features.to_dict().items():
    print_once(f"{feature:8} bag of each sample: {[bag.tolist() for bag in bags.to_dense()]}")

# %% [markdown]
# ## 4. From features to a KeyedTensor
#
# Ids get rows when they are first seen in training. `recfx.draw` shows the model before and after, and each node can be
# asked for its details; with a path, it writes the page into an `.html` file.

# %%
pooled = model.ebc(features)
shapes = {key: tuple(pooled[key].shape) for key in pooled.keys()}  # noqa: SIM118  # a batch is not a dict
print_once(f"a {type(pooled).__name__} of {shapes}")
print_once("ids of product_table and their rows:", *model.ebc.index("product_table").items())
recfx.draw(model.ebc)

# %% [markdown]
# ## 5. A plan for several ranks
#
# TorchRec's planner places the tables; `recfx.plan` calls it, and also knows of NPUs. Under `torchrun` there are
# several ranks, here there is one.

# %%
join_group(device)
model = recfx.convert(Model(), hashing=RAW_IDS)
plan = recfx.plan(model, topology(device, dist.get_world_size(), dist.get_world_size()))
for table, placed in plan.plan["ebc"].items():
    print_once(f"{table}: {placed.sharding_type}, {placed.compute_kernel}, on ranks {placed.ranks}")

# %% [markdown]
# ## 6. Input dist, lookup, output dist
#
# A sharded collection sends ids to the ranks of their tables, looks rows up, and sends pooled rows back. These
# stages are nodes of its graph, and can be called one by one, as TorchRec's can. The last one gives a `LazyAwaitable`,
# which waits for the other ranks when it is first used.

# %%
(sharder,) = [sharder for sharder in recfx.sharders() if sharder.module_type is type(model.ebc)]
sharded = sharder.shard(model.ebc, plan.plan["ebc"], ShardingEnv.from_process_group(dist.group.WORLD), device)
context = sharded.create_context()
arrived = sharded.input_dist(context, features).wait().wait()
bags_here = {key: [bag.tolist() for bag in part[key].to_dense()] for part in arrived for key in part.keys()}  # noqa: SIM118
in_order(f"rank {dist.get_rank()} has bags of all ranks: {bags_here}")
result = sharded.output_dist(context, sharded.compute(context, arrived))
print_once("output_dist gives a LazyAwaitable:", type(result).__name__)
print_once("the same as sharded(features):", torch.equal(sharded(features).values(), result.values()))
recfx.draw(sharded)

# %% [markdown]
# ## 7. DistributedModelParallel
#
# It shards a whole model, and averages the gradients of its dense part over the ranks. Nothing but the plan says which
# tables are where.


# %%
def parallel_model(fused_params: dict[str, object] | None = None) -> DistributedModelParallel:
    """A new model on all ranks; the optimizer of its tables is Adagrad, set in one of the two ways."""
    torch.manual_seed(0)
    model = recfx.convert(Model(), hashing=RAW_IDS)
    if fused_params is None:
        apply_optimizer_in_backward(torch.optim.Adagrad, model.ebc.parameters(), {"lr": 0.2, "eps": 1e-8})
    return DistributedModelParallel(model, device=device, plan=plan, sharders=recfx.sharders(fused_params=fused_params))


parallel = parallel_model()
print_once("the collection in it is a", type(parallel.module.ebc).__name__)
print_once("its fused optimizer is a", type(parallel.fused_optimizer).__name__)

# %% [markdown]
# ## 8. The optimizer, and training
#
# The tables take their step in backward, by an optimizer that `apply_optimizer_in_backward` or `fused_params` has set;
# both ways have the same result. The rest of the model has an ordinary optimizer.


# %%
def draw_sample(draw: torch.Generator, size: int = 256) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """Raw ids of 50 products and users; they match if both are even or both are odd."""
    products, users = torch.randint(50, (2, size), generator=draw)
    ids = torch.cat([products, users]) * 0x1234_5678_9ABC_DEF - 2**62  # an odd factor
    features = KeyedJaggedTensor(["product", "user"], ids, lengths=torch.ones(2 * size, dtype=torch.int64))
    return features, (products % 2 == users % 2).float()


def train(parallel: DistributedModelParallel, steps: int = 40) -> tuple[float, float]:
    """The first and the last loss of this rank."""
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(parallel.named_parameters())),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    )
    optimizer = CombinedOptimizer([parallel.fused_optimizer, dense])
    draw, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(steps):
        features, labels = draw_sample(draw)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(parallel(features.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses[0], losses[-1]


adagrad = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.2, "eps": 1e-8}
for name, trained in (("in_backward", parallel), ("fused_params", parallel_model(adagrad))):
    first, last = train(trained)
    print_once(f"{name:12} loss {first:.4f} -> {last:.4f}")
    assert last < first

# %% [markdown]
# ## 9. Inference
#
# `recfx.export` writes a file with quantized rows and with the indexes, which takes raw ids and needs no Python;
# `examples/inference.py` has TorchRec's own way as well: quantize, shard, script. The
# trained weights are gathered from the ranks by the export.

# %%
batch = draw_sample(torch.Generator().manual_seed(0), size=64)[0].to(device)
parallel.eval()
os.makedirs("build/tour", exist_ok=True)
report = recfx.export(parallel, "build/tour/model.pt", (batch,), quantize="int8")
print_once(f"{report.format}, rows as {report.tables[0].stored_as}")
with torch.no_grad():
    expected = parallel(batch).cpu()
if dist.get_rank() == 0:
    difference = float((recfx.load("build/tour/model.pt")(batch.to("cpu")) - expected).abs().max())
    print(f"the loaded file answers as the model does: {difference < 0.05}")

# %%
dist.barrier()
dist.destroy_process_group()
