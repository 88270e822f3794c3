"""What the report says of TorchRec's virtual tables, by their eviction policies."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torchrec import EmbeddingBagCollection

from recfx import HashConfig, convert
from recfx.errors import Diagnostic
from recfx.inspect.explain import explain
from tests.inspect.models import Wrapped, config
from tests.support.needs import needed

_CONFIGS = "torchrec.modules.embedding_configs"
CountBasedEvictionPolicy = needed(f"{_CONFIGS}.CountBasedEvictionPolicy", "TorchRec 1.4")
CountTimestampMixedEvictionPolicy = needed(f"{_CONFIGS}.CountTimestampMixedEvictionPolicy", "TorchRec 1.4")
FeatureL2NormBasedEvictionPolicy = needed(f"{_CONFIGS}.FeatureL2NormBasedEvictionPolicy", "TorchRec 1.4")
FeatureScoreBasedEvictionPolicy = needed(f"{_CONFIGS}.FeatureScoreBasedEvictionPolicy", "TorchRec 1.4")
NoEvictionPolicy = needed(f"{_CONFIGS}.NoEvictionPolicy", "TorchRec 1.4")
TimestampBasedEvictionPolicy = needed(f"{_CONFIGS}.TimestampBasedEvictionPolicy", "TorchRec 1.4")
VirtualTableEvictionPolicy = needed(f"{_CONFIGS}.VirtualTableEvictionPolicy", "TorchRec 1.4")


def said_of(model: nn.Module) -> list[Diagnostic]:
    return [reason for reason in explain(model).reasons if reason.code == "virtual_table_not_followed"]


@pytest.mark.parametrize(
    ("policy", "differs", "closest"),
    [
        (TimestampBasedEvictionPolicy(eviction_ttl_mins=90), "not minutes", "ttl_batches=<the batches of 90 minutes>)"),
        (TimestampBasedEvictionPolicy(eviction_ttl_mins=0), "are errors", "as many rows="),
        (CountBasedEvictionPolicy(eviction_threshold=7), "do not decay", "evict='lfu', admit_after=7)"),
        (CountTimestampMixedEvictionPolicy(eviction_threshold=3), "who gets a row", "of 1440 minutes>, admit_after=3)"),
        (CountTimestampMixedEvictionPolicy(eviction_ttl_mins=0), "do not decay", "evict='lfu', admit_after=15)"),
        (FeatureScoreBasedEvictionPolicy(), "reads feature scores", "evict='lfu')"),
        (FeatureScoreBasedEvictionPolicy(eviction_ttl_mins=5), "not minutes", "of 5 minutes>)"),
        (FeatureL2NormBasedEvictionPolicy(), "reads the norm", "evict='lfu')"),
        (NoEvictionPolicy(), "are errors", "as many rows="),
        (VirtualTableEvictionPolicy(), "does not know this policy", "as many rows="),
        (None, "are errors", "as many rows="),
    ],
)
def test_policies_of_virtual_tables(policy: Any, differs: str, closest: str) -> None:
    virtual = config(0, use_virtual_table=True, virtual_table_eviction_policy=policy)
    model = Wrapped(EmbeddingBagCollection(tables=[virtual, config(1)]))
    (reason,) = said_of(convert(model))
    name = "use_virtual_table" if policy is None else type(policy).__name__
    assert reason.message.startswith(f"{name} does nothing: it has 100 rows, and ids are rows. ")
    assert differs in reason.message
    assert closest in reason.what_to_do
    (raw,) = said_of(convert(model, hashing=HashConfig(dense_rows=0)))
    assert "ids get rows by its HashConfig" in raw.message
    assert (reason.path, reason.severity.name, raw.severity.name) == ("inner.embedding_bags.t0", "WARNING", "INFO")


def test_the_text_names_each_policy_of_virtual_tables_and_one_of_those_alike() -> None:
    policies = [CountBasedEvictionPolicy(), TimestampBasedEvictionPolicy(eviction_ttl_mins=60), NoEvictionPolicy()]
    policies += [TimestampBasedEvictionPolicy(eviction_ttl_mins=90)]
    tables = [
        config(number, use_virtual_table=True, virtual_table_eviction_policy=policy)
        for number, policy in enumerate(policies)
    ]
    text = str(explain(Wrapped(EmbeddingBagCollection(tables=tables))))
    for words in ("t0: CountBased", "t1: TimestampBased", "t2: NoEviction", "batches of 60 minutes", "and 1 more"):
        assert words in " ".join(text.split())
