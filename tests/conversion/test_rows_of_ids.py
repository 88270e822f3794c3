"""What ``unconvert`` returns maps raw ids to rows: the plain model then answers as the converted one does."""

import copy
import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor, PoolingType

import recfx
from tests.builders.collections import sequence_table, table
from tests.support.refusals import refused

RAW = recfx.HashConfig(dense_rows=0)


class Both(nn.Module):
    """Pooled tables of two features and of one, a sequence table, and one whose ids are rows."""

    def __init__(self, sequence: str = "seen") -> None:
        super().__init__()
        pooled = [table("goods", ["item", "other"], rows=30, dim=4), table("users", ["user"], rows=30, dim=4)]
        self.ebc = EmbeddingBagCollection([*pooled, table("days", ["day"], rows=7, dim=4)], is_weighted=True)
        self.ec = EmbeddingCollection([sequence_table("goods", [sequence], rows=30, dim=4)])

    def forward(self, features: KeyedJaggedTensor) -> list[torch.Tensor]:
        (rows,) = self.ec(features).values()
        return [self.ebc(features).values(), rows.values(), rows.lengths()]


KEYS = ["item", "user", "day", "seen", "other"]


def batch(*ids: list[list[int]]) -> KeyedJaggedTensor:
    """The ids of each bag, by key; every id has a weight of its own."""
    bags = [bag for of_key in ids for bag in of_key]
    values = torch.tensor([id_ for bag in bags for id_ in bag], dtype=torch.int64)
    weights = torch.arange(len(values)) / 4 + 1
    return KeyedJaggedTensor(KEYS, values, weights, lengths=torch.tensor([len(bag) for bag in bags]))


SEEN = batch([[7, 2**62], []], [[-1], [5, 5]], [[3], [6]], [[10**12, 7, -9], [7]], [[2**62], [8]])


def unconverted(model: nn.Module, **hashing: recfx.HashConfig | None) -> tuple[Any, Any, Any]:
    """The trained model in eval mode, and what ``unconvert`` makes of it."""
    converted = recfx.convert(model, hashing={"goods": RAW, "users": RAW, "days": None, **hashing})
    converted(SEEN)
    plain_and_mapping: Any = recfx.unconvert(converted, with_mapping=True)
    return converted.eval(), *plain_and_mapping


def test_the_plain_model_answers_as_the_converted_one() -> None:
    """Adopted users have ids that are their rows, and new ones."""
    for users in (RAW, recfx.HashConfig(rows=40, dense_rows=30)):
        model, plain, mapping = unconverted(Both(), users=users)
        assert isinstance(mapping, dict)
        assert mapping.keys() == {"ebc.goods", "users", "ec.goods"}
        saved = io.BytesIO()
        torch.save(mapping, saved)
        saved.seek(0)
        for duplicate in (mapping, copy.deepcopy(mapping), pickle.loads(pickle.dumps(mapping)), torch.load(saved)):
            for features in (SEEN, batch([[]], [[]], [[]], [[]], [[]])):
                for output, expected in zip(plain(duplicate.to_rows(features)), model(features), strict=True):
                    assert torch.equal(output, expected)


def test_ids_without_a_row_are_left_out() -> None:
    model, plain, mapping = unconverted(Both())
    features = batch([[99, 7], [99]], [[-1, 98], []], [[3], [6]], [[], [7]], [[8], []])
    rows = mapping.to_rows(features)
    assert rows.lengths().tolist() == [1, 0, 1, 0, 1, 1, 0, 1, 1, 0]
    assert rows.weights().tolist() == [1.25, 1.75, 2.25, 2.5, 2.75, 3.0]
    assert torch.equal(plain(rows)[0], model(features)[0])


@dataclass(frozen=True)
class Parts:
    sparse: KeyedJaggedTensor
    dense: torch.Tensor


def test_every_part_of_a_batch_is_mapped() -> None:
    _, _, mapping = unconverted(Both())
    dense, expected = torch.rand(2, 3), mapping.to_rows(SEEN).values()
    parts, (named, labels) = mapping.to_rows((Parts(SEEN, dense), ({"a": SEEN, "b": SEEN}, dense)))
    assert all(torch.equal(features.values(), expected) for features in (parts.sparse, named["a"], named["b"]))
    assert parts.dense is dense
    assert labels is dense
    with refused("invalid_argument", error=recfx.InputError):
        mapping.to_rows({"dense": dense})


def test_ids_of_a_sequence_keep_their_places() -> None:
    """Left out, they would move all that come after them, beside other features of the same sequence."""
    _, _, mapping = unconverted(Both())
    features = batch([[7], []], [[-1], [98]], [[3], [6]], [[97, 7], [96, 10**12]], [[8], []])
    with refused("id_without_row"):
        mapping.to_rows(features)


def test_a_mean_counts_ids_without_a_row() -> None:
    tables = [table("t", ["f"], rows=9, dim=4, pooling=PoolingType.MEAN)]
    model = recfx.convert(nn.ModuleDict({"ebc": EmbeddingBagCollection(tables)}), hashing=RAW)
    two = torch.tensor([2])
    known, unknown = (KeyedJaggedTensor(["f"], torch.tensor([5, id_]), lengths=two) for id_ in (7, 99))
    model["ebc"](known)
    plain, mapping = recfx.unconvert(model.eval(), with_mapping=True)
    assert torch.equal(plain["ebc"](mapping.to_rows(known)).values(), model["ebc"](known).values())
    with refused("id_without_row"):
        mapping.to_rows(unknown)


def test_ids_without_a_row_read_the_one_that_they_share() -> None:
    model, plain, mapping = unconverted(Both(), users=recfx.HashConfig.raw_ids(unseen="row", buckets=1))
    features = batch([[7], []], [[-1, 98], [5]], [[3], [6]], [[7], []], [[8], []])
    output, expected = plain(mapping.to_rows(features))[0], model(features)[0]
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)  # two weighted rows are added in other orders
    _, _, mapping = unconverted(Both(), users=recfx.HashConfig.raw_ids(unseen="share"))
    with refused("shared_rows_unknown"):
        mapping.to_rows(features)
    assert mapping.to_rows(SEEN).values().numel() == SEEN.values().numel()


def test_a_batch_size_for_each_key() -> None:
    _, _, mapping = unconverted(Both())
    inverse = KEYS, torch.tensor([[0, 0], [0, 1], [1, 0], [0, 1], [0, 0]])
    features = KeyedJaggedTensor(
        KEYS,
        torch.tensor([7, 98, 5, 3, 4, 7, 7, 8]),
        lengths=torch.tensor([1, 1, 1, 1, 1, 2, 0, 1]),
        stride_per_key_per_rank=[[1], [2], [2], [2], [1]],
        inverse_indices=inverse,
    )
    rows = mapping.to_rows(features)
    assert rows.stride_per_key() == [1, 2, 2, 2, 1]
    assert rows.lengths().tolist() == [1, 0, 1, 1, 1, 2, 0, 1]
    assert rows.inverse_indices() is inverse


def test_a_feature_of_two_tables_needs_the_same_rows_in_both() -> None:
    _, _, mapping = unconverted(Both("other"))
    with refused("several_rows"):
        mapping.to_rows(SEEN)
    assert mapping.to_rows(batch([[7]], [[]], [[]], [[]], [[]])).values().tolist() == [0]
    with refused("invalid_argument", error=recfx.InputError):
        mapping.to_rows({"user": torch.tensor([1])})
