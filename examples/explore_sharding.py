"""What each sharding type does to a converted collection: plan, shards, and the graph with its communication.

    python examples/explore_sharding.py                                  # every type, on 2 processes
    python examples/explore_sharding.py --world-size 4 --type grid_shard
    torchrun --nproc-per-node 2 examples/explore_sharding.py --type row_wise
    python examples/explore_sharding.py --device npu                     # or cuda; a device per process

There are two large tables and two small ones, which already hold some ids: rows and ids move to the shards together.
Four processes stand for two hosts with two each. Each rank looks up its batch and compares the result with that of the
unsharded collection.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from processes import find_device, in_order, print_once, process_group, quiet, topology
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ShardingEnv, ShardingType

import recfx
from recfx.ir import format_graph

ROWS = {"large_0": 4096, "large_1": 4096, "small_0": 1024, "small_1": 1024}
FEATURES = {table: table.replace("_", "_feature_") for table in ROWS}
DIM, BATCH_SIZE, RANKS_A_HOST = 64, 8, 2
TYPES = [kind.value for kind in ShardingType]


def main() -> int:
    options = parse_arguments()
    if "RANK" in os.environ:  # started by torchrun
        run_rank(options)
        return 0
    # A forked process imports nothing anew, but cannot use a device whose driver was loaded before.
    method = "fork" if options.device == "cpu" else "spawn"
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run_started, (options, folder), nprocs=options.world_size, start_method=method)
    return 0


def run_started(rank: int, options: argparse.Namespace, folder: str) -> None:
    size = str(options.world_size)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    run_rank(options, init_method=f"file://{folder}/ranks", rank=rank, world_size=options.world_size)


def run_rank(options: argparse.Namespace, **rendezvous: object) -> None:
    quiet()
    torch.set_num_threads(1)
    device = find_device(options.device)
    batches = [draw_batch(seed) for seed in range(int(os.environ["WORLD_SIZE"]))]
    collection = build()
    for batch in batches:  # every id gets its row, the same on every rank
        collection(batch)
    with process_group(device, **rendezvous):
        for kind in options.type:
            explore(kind, collection, batches, device)


def explore(
    kind: str, collection: recfx.HashEmbeddingBagCollection, batches: list[KeyedJaggedTensor], device: torch.device
) -> None:
    """Plan, shard, look up, and print the results; the collection stays as it is."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print_once(f"\n\n== {kind} on {world_size} processes {'=' * 40}")

    # TorchRec's planner, constrained to one sharding type
    columns = DIM // 2 if kind in ("column_wise", "table_column_wise", "grid_shard") else None
    limits = ParameterConstraints(sharding_types=[kind], min_partition=columns)
    hosts = topology(device, world_size, RANKS_A_HOST)
    plan = recfx.plan(collection, hosts, dict.fromkeys(ROWS, limits), batch_size=BATCH_SIZE)
    print_once(f"\nplan of all ranks: {plan}")

    (sharder,) = [sharder for sharder in recfx.sharders() if sharder.module_type is type(collection)]
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = sharder.shard(collection, plan.plan[""], env, device)

    in_order(describe(sharded))
    print_once(f"\nrewritten graph, rank 0:\n{format_graph(sharded.graph_module)}")

    ours = sharded.eval()(batches[rank].to(device)).values().cpu()
    whole = collection.eval()(batches[rank]).values()
    difference = float((ours - whole).detach().abs().max())
    in_order(f"rank {rank}: {list(ours.shape)}, at most {difference:.1e} from the unsharded collection")
    torch.testing.assert_close(ours, whole)


def build() -> recfx.HashEmbeddingBagCollection:
    """A standard collection, converted; the same on every rank."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[FEATURES[name]])
        for name, rows in ROWS.items()
    ]
    # Rows are cut between buckets. Tables this small would have one bucket by default, and so only one row-wise shard.
    return recfx.convert(EmbeddingBagCollection(tables), hashing=recfx.HashConfig.raw_ids(buckets=8))


def draw_batch(seed: int) -> KeyedJaggedTensor:
    """Bags of up to three raw ids."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(ROWS) * BATCH_SIZE,), generator=draw)
    ids = torch.randint(-(2**63), 2**63 - 1, (int(lengths.sum()),), generator=draw)
    return KeyedJaggedTensor(list(FEATURES.values()), ids, lengths=lengths)


def describe(sharded: torch.nn.Module) -> str:
    """This rank's shards."""
    lines = [f"rank {dist.get_rank()} holds:"]
    for shard in sharded.sharding.local():
        weight = tuple(sharded.embedding_bags[shard.name].weight.shape)
        ids = len(sharded.hash_indexes[shard.name])
        rows, columns = (f"{first}..{end - 1}" for first, end in (shard.rows, shard.columns))
        lines.append(f"  {shard.name:10} {weight!s:11} rows {rows:10} columns {columns:6} {ids:3} ids in its index")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", help="of the shards: cpu, cuda, npu (default %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="one type, only to see that everything runs")
    parser.add_argument("--world-size", type=int, choices=(2, 4), default=2, help="processes to start (default 2)")
    parser.add_argument("--type", choices=TYPES, action="append", help="a sharding type (default: each in turn)")
    options = parser.parse_args()
    options.type = options.type or (["row_wise"] if options.smoke else TYPES)
    return options


if __name__ == "__main__":
    sys.exit(main())
