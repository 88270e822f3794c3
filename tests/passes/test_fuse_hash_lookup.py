"""fuse_hash_lookup: what becomes one node, what does not and why, and that the results are the same to the last bit."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torchrec import DataType, KeyedJaggedTensor

import recfx
from recfx import HashConfig, HashEmbeddingBagCollection
from recfx.ir import format_graph
from recfx.passes import passes
from recfx.passes.fuse_hash_lookup import fuse_hash_lookup
from recfx.runtime.hash_ids import HashIds, HashLookup
from tests.builders.optimizers import attach
from tests.passes.small_collection import ADOPTED, INDEXED, after, collection, lowered, node, rewritten, table

EVICTING = HashConfig(dense_rows=0, on_full="evict")


def test_the_printed_graph_differs_before_and_after() -> None:
    """``test_hashed_tables_share_one_lookup`` has the text before."""
    _, fused, modified, declined = after("fuse_hash_lookup", collection(INDEXED, INDEXED))
    assert (modified, declined) == (True, [])
    assert (
        fused
        == """\
features = input
ebc_select_features = select_features(features)
ebc_hash_lookup = hash_lookup(ebc_select_features) {hashed=[users, ads], tables=[users, ads], combine=SUM, dtype=float32}
ebc_mean_divide = mean_divide(ebc_hash_lookup, ebc_select_features) {divided=[users]}
ebc_keyed_tensor = keyed_tensor(ebc_mean_divide)
return ebc_keyed_tensor"""  # noqa: E501
    )


def test_an_adopted_table_beside_a_hashed_one_is_fused_with_it() -> None:
    converted = HashEmbeddingBagCollection([table("a", INDEXED), table("b", ADOPTED)])
    assert "hash_lookup(ebc_select_features) {hashed=[a], operators=cpu, tables=[a, b]," in format_graph(
        converted.graph_module
    )


def test_an_evicting_table_says_when_it_runs_in_two_steps() -> None:
    _, before, _, _ = after("batch_lookups", collection(EVICTING, INDEXED))
    assert "ebc_lookup = lookup(ebc_rows, ebc_batch_in_flight)" in before
    _, fused, modified, _ = after("lower", collection(EVICTING, INDEXED))
    assert modified
    assert "batch_in_flight" not in fused
    assert "kernel=cpu, two_steps=in_training}" in fused


# What declines


def test_several_lookups() -> None:
    _, text, modified, declined = after("fuse_hash_lookup", collection(ADOPTED, INDEXED))
    assert (modified, declined) == (False, ["several_lookups"])
    fuse = rewritten(collection(ADOPTED, INDEXED), "fuse_hash_lookup").records[-1]
    (diagnostic,) = fuse.declined
    assert (fuse.name, diagnostic.by, diagnostic.node) == ("fuse_hash_lookup", "fuse_hash_lookup", "ebc_hash_ids")
    assert "ebc_lookup, ebc_lookup_1 read the rows" in diagnostic.message
    assert "hash_lookup" not in text


@pytest.mark.parametrize("backend", ["fbgemm", "reference"])
def test_a_target_without_a_finding_kernel(backend: str) -> None:
    made = rewritten(collection(INDEXED, INDEXED), "lower", backend)
    fuse = next(record for record in made.records if record.name == "fuse_hash_lookup")
    (declined,) = fuse.declined
    assert (declined.by, declined.code, declined.node) == (backend, "no_finding_kernel", "ebc_hash_ids")
    assert (
        f"lookup(ebc_hash_ids) {{tables=[users, ads], combine=SUM, dtype=float32, kernel={backend}}}"
        in format_graph(made.graph)
    )


def test_keys_in_another_order() -> None:
    graph, _, _, _ = after("batch_lookups", collection(INDEXED, INDEXED))
    graph.change(node(graph, "ebc_lookup"), tables=("ads", "users"))
    assert [refusal.code for refusal in fuse_hash_lookup(graph).declined] == ["keys_need_permutation"]


# What runs


def two_forms(on_full: str = "error", is_weighted: bool = False, dtype: Any = "fp32", **config: Any) -> tuple[Any, Any]:
    """A collection of two tables of raw ids and an adopted one, fused, and with the graph that it had before that."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        hashing = HashConfig(dense_rows=0, on_full=on_full, **config)  # type: ignore[arg-type]
        tables = [table("a", hashing), table("b", hashing), table("c", ADOPTED)]
        for config_of_table in tables:
            config_of_table.data_type = DataType[dtype.upper()]
        converted = HashEmbeddingBagCollection(tables, is_weighted)
        attach(converted, torch.optim.Adagrad)
        converted.fused_optimizers()  # takes them over, and compiles
        made.append(converted)
    fused, plain = made
    plain.graph_module = lowered(plain, [pass_ for pass_ in passes() if pass_.name != "fuse_hash_lookup"])
    return fused, plain


def batches(universe: int, is_weighted: bool, steps: int = 6) -> list[KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(steps):
        lengths = torch.randint(0, 3, (9,), generator=generator)
        count, raw = int(lengths.sum()), int(lengths[:6].sum())
        ids = torch.randint(-universe, universe, (count,), generator=generator)
        ids[raw:] %= 8  # rows of the adopted table
        weights = torch.rand(count, generator=generator).requires_grad_() if is_weighted else None
        made.append(KeyedJaggedTensor(["a", "b", "c"], ids, weights, lengths))
    return made


@pytest.mark.parametrize(
    "config",
    [
        {"universe": 4},
        {"universe": 4, "unseen": "share"},
        {"universe": 40, "on_full": "share"},
        {"universe": 40, "on_full": "evict"},
        {"universe": 40, "on_full": "evict", "admit_after": 2, "unseen": "share"},
        {"universe": 4, "is_weighted": True},
        {"universe": 4, "unseen": "share", "dtype": "fp16"},
        {"universe": 40, "on_full": "share", "is_weighted": True, "dtype": "fp16"},
    ],
    ids=str,
)
def test_both_forms_give_the_same_bits(config: dict[str, Any]) -> None:
    universe, is_weighted = config.pop("universe"), config.get("is_weighted", False)
    fused, plain = two_forms(**config)
    assert type(fused.graph_module.get_submodule("hash_lookup")) is HashLookup
    assert type(plain.graph_module.get_submodule("hash_ids")) is HashIds
    for number, (batch, same) in enumerate(zip(*(batches(universe, is_weighted) for _ in range(2)), strict=True)):
        fused.train(number % 3 != 2)
        plain.train(number % 3 != 2)
        outputs = [fused(batch).values(), plain(same).values()]
        assert torch.equal(*outputs)
        for output in outputs:
            if output.requires_grad and number != 1:  # the batch of step 1 stays without a backward
                output.square().sum().backward()
        if is_weighted and number != 1:
            assert torch.equal(batch.weights().grad, same.weights().grad)
    for mine, theirs in zip(fused.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    for name in ("a", "b"):
        assert fused.index(name).counters == plain.index(name).counters


def test_tables_that_moved_to_a_target_without_a_finding_kernel_run_in_two_steps_and_print_it() -> None:
    converted = collection(INDEXED, INDEXED)
    converted.graph_is_inlined = True  # the graph stays, as those of whole models do
    converted.to(torch.float64)  # chosen for float32: the next call chooses again
    assert "kernel=cpu}  # now {dtype=float64}" in format_graph(converted.graph_module)
    batch = KeyedJaggedTensor(
        ["user", "friend", "ad"], torch.tensor([7, 8, 9]), lengths=torch.ones(3, dtype=torch.long)
    )
    pooled = converted(batch).values()
    assert "  # now {dtype=float64, kernel=reference, two_steps=always}" in format_graph(converted.graph_module)
    weights = [converted.weight(name)[row] for name, row in (("users", 0), ("users", 1), ("ads", 0))]
    torch.testing.assert_close(pooled, torch.cat(weights).unsqueeze(0).to(pooled.dtype))


def test_a_replay_inserts_and_counts_nothing() -> None:
    fused, _ = two_forms()
    batch = KeyedJaggedTensor(["a", "b", "c"], torch.tensor([5, 6, 5]), lengths=torch.tensor([2, 1, 0]))
    scale = torch.ones(1, requires_grad=True)
    checkpoint(lambda s: fused(batch).values() * s, scale, use_reentrant=False).sum().backward()
    assert [fused.index(name).counters["ids_seen"] for name in ("a", "b")] == [2, 1]


def test_inside_torch_func_it_gives_gradients() -> None:
    converted = collection(INDEXED, INDEXED)
    batch = KeyedJaggedTensor(
        ["user", "friend", "ad"], torch.tensor([7, 8, 9]), lengths=torch.ones(3, dtype=torch.long)
    )
    parameters = dict(converted.named_parameters())

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(converted, parameters, (batch,)).values().sum()

    gradients = torch.func.grad(loss)(parameters)
    assert gradients["embedding_bags.ads.weight"].sum() == 4


def test_rows_that_eval_mode_reads_with_gradients_stay_until_the_backward() -> None:
    fused, _ = two_forms("evict")
    full = KeyedJaggedTensor(["a", "b", "c"], torch.tensor([1, 2, *range(11, 19)]), lengths=torch.tensor([2, 8, 0]))
    fused(full).values().sum().backward()
    fused.eval()
    output = (
        fused(KeyedJaggedTensor(["a", "b", "c"], torch.arange(11, 19), lengths=torch.tensor([0, 8, 0]))).values().sum()
    )
    fused.train()
    second = KeyedJaggedTensor(["a", "b", "c"], torch.tensor([1, 21]), lengths=torch.tensor([1, 1, 0]))
    with pytest.raises(recfx.TableFullError, match="in use"):
        fused(second)
    output.backward()
    fused(second)
    assert fused.index("b").counters["evicted"] == 1
