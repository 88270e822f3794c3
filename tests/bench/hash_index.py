"""``hash_index``: one index alone, from half a million to twenty million ids, against other ways to find rows of ids.

Peers: ``fbgemm::pruned_hashmap_lookup`` (finds only; it reads our frozen slot table) and TorchRec's managed collisions
(a sorted list of ids).

Every batch is newly drawn; in ``steady`` batches, one id in a hundred is new. A fifth of the ids that an index holds is
never asked for: an index that evicts finds these first, and evicts about as many ids as are new.
"""

from collections.abc import Callable, Iterator
from typing import Any

import fbgemm_gpu  # noqa: F401  (loads the operators)
import torch
from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from recfx.hashing import HashConfig, HashIndex
from recfx.kernels.index.mix64 import mix64
from tests.bench.harness import Contestant, Result, compare, take_turns
from tests.bench.setup import DISTRIBUTIONS, POWER_LAW_EXPONENT, Setup

FIND, PRUNED = "HashIndex.find", "fbgemm::pruned_hashmap_lookup"
STEADY, EVICT_LRU, EVICT_LFU = "find_or_insert, 1% new", "1% new, evicting (lru)", "1% new, evicting (lfu)"
MANAGED = "managed collisions, 1% new"
NEW_IN = 100
TAKEN = 0.75
"""Share of the rows that have an id if nothing is evicted."""
OLD = 0.2
"""Share of the ids in an index that evicts which no batch asks for: they are evicted first."""


def run(setup: Setup) -> Iterator[Result]:
    """Find, steady state and eviction for every size."""
    for size in setup.index_sizes:
        for distribution in DISTRIBUTIONS:
            batches = Batches(setup, size, distribution)
            yield from _find(setup, batches)
            yield from _steady(setup, batches)


class Batches:
    """Raw ids for every iteration.

    Args:
        setup: gives the number of iterations and of ids per batch.
        size: number of ids in the index.
        distribution: ``"uniform"`` or ``"power law"``.
    """

    def __init__(self, setup: Setup, size: int, distribution: str) -> None:
        self.size, self.distribution = size, distribution
        count = setup.tables * setup.batch * setup.bag_length
        generator = torch.Generator().manual_seed(5)
        self.old = int(OLD * size)
        self.resident: list[torch.Tensor] = []
        self.steady: list[torch.Tensor] = []
        new_id = size
        for _ in range(setup.iterations + setup.warm_up):
            dense = self._draw(count, generator)
            self.resident.append(mix64(dense))
            places = torch.randperm(count, generator=generator)[: count // NEW_IN]
            dense = dense.index_copy(0, places, torch.arange(new_id, new_id + places.numel()))
            new_id += places.numel()
            self.steady.append(mix64(dense))
        self.new_ids = new_id - size

    def _draw(self, count: int, generator: torch.Generator) -> torch.Tensor:
        if self.distribution == "uniform":
            return torch.randint(self.old, self.size, (count,), generator=generator)
        # Inverse of the continuous power law's distribution function; ranks are scattered by mix64 afterwards.
        power = 1 - POWER_LAW_EXPONENT
        drawn = torch.rand(count, dtype=torch.float64, generator=generator)
        asked = self.size - self.old
        ranks = (1 + drawn * ((asked + 1) ** power - 1)) ** (1 / power)
        return self.old + (ranks.long() - 1).clamp_(0, asked - 1)

    def filled(self, rows: int, **config: Any) -> HashIndex:
        index = HashIndex(rows, config=HashConfig(**config))
        piece = max(1, min(2**18, rows // 8))  # a batch evicts none of its own ids, so it must not fill a whole bucket
        for begin in range(0, self.size, piece):
            index.find_or_insert(mix64(torch.arange(begin, min(begin + piece, self.size))))
        if config.get("evict") == "lfu":  # the ids that batches ask for have been seen more often than the old ones
            for begin in range(self.old, self.size, piece):
                index.find_or_insert(mix64(torch.arange(begin, min(begin + piece, self.size))))
        return index


def _facts(setup: Setup, batches: Batches, index: HashIndex) -> dict[str, Any]:
    size = sum(tensor.numel() * tensor.element_size() for tensor in index.index_buffers())
    return {
        "tables": 1, "rows": index.config.rows, "dim": 0, "batch": len(batches.resident[0]), "bag_length": 1,
        "ids": batches.distribution, "threads": setup.threads, "ids_in_index": batches.size,
        "index_bytes_a_row": round(size / index.config.rows, 1),
    }  # fmt: skip


def _find(setup: Setup, batches: Batches) -> Iterator[Result]:
    index = batches.filled(int(batches.size / TAKEN))
    slots, _ = index.slot_table()
    count = len(batches.resident[0])
    offsets, slot_offsets = torch.tensor([0, count]), torch.tensor([0, slots.shape[0]])

    def pruned(ids: torch.Tensor) -> torch.Tensor:
        return torch.ops.fbgemm.pruned_hashmap_lookup(ids, offsets, slots, slot_offsets)

    if not torch.equal(index.find(batches.resident[0]), pruned(batches.resident[0])):
        raise AssertionError("find and fbgemm::pruned_hashmap_lookup differ")
    contestants = [
        Contestant(FIND, lambda i: index.find(batches.resident[i])),
        Contestant(PRUNED, lambda i: pruned(batches.resident[i]), every=4),
    ]
    times = take_turns(contestants, setup.iterations, setup.warm_up)
    yield compare(f"hash_index/find/{_case(batches)}", times, FIND, PRUNED, _facts(setup, batches, index))


def _steady(setup: Setup, batches: Batches) -> Iterator[Result]:
    """New ids in every batch: they get free rows, or evict others."""
    roomy = batches.filled(int(batches.size / TAKEN) + 2 * batches.new_ids)
    evicting = {
        name: batches.filled(batches.size, on_full="evict", evict=evict)
        for name, evict in ((EVICT_LRU, "lru"), (EVICT_LFU, "lfu"))
    }
    contestants = [
        Contestant(FIND, lambda i: roomy.find(batches.resident[i])),
        Contestant(STEADY, lambda i: roomy.find_or_insert(batches.steady[i])),
        *(Contestant(name, _insert_into(index, batches)) for name, index in evicting.items()),
    ]
    if batches.size <= setup.index_sizes[0]:  # beyond that a batch takes seconds
        contestants.append(Contestant(MANAGED, _managed(batches), every=4))
    times = take_turns(contestants, setup.iterations, setup.warm_up)
    facts = _facts(setup, batches, roomy)
    yield compare(f"hash_index/steady/{_case(batches)}", times, STEADY, FIND, facts)
    for name, index in evicting.items():
        evicted = index.counters["evicted"] // (setup.iterations + setup.warm_up)
        facts = {**_facts(setup, batches, index), "evicted_a_batch": evicted}
        yield compare(f"hash_index/evicting/{_case(batches)}", times, name, FIND, facts)
        if MANAGED in times:
            yield compare(f"hash_index/managed_collisions/{_case(batches)}", times, name, MANAGED, facts)


def _insert_into(index: HashIndex, batches: Batches) -> Callable[[int], object]:
    return lambda i: index.find_or_insert(batches.steady[i])


def _managed(batches: Batches) -> Callable[[int], object]:
    """TorchRec's managed collisions, made to admit new ids in every batch, as ours does."""
    module = MCHManagedCollisionModule(
        zch_size=batches.size,
        device=torch.device("cpu"),
        eviction_policy=DistanceLFU_EvictionPolicy(),
        eviction_interval=1,
        input_hash_size=2**63 - 1,
    ).train()

    def train(i: int) -> object:
        ids = batches.steady[i] & (2**62 - 1)  # it does not accept negative ids
        features = {"feature": JaggedTensor(ids, lengths=torch.ones_like(ids))}
        return module.remap(module.profile(features))

    return train


def _case(batches: Batches) -> str:
    return f"{batches.size}_ids/{batches.distribution.replace(' ', '_')}"
