"""Models with sequence tables, which have a row for each id: alone, beside pooled ones, and as whole recommenders."""

from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recfx.models.sample import Sample
from tests.builders.batches import batch
from tests.builders.collections import collection, sequence_table, sequences, table
from tests.models.case import Case

_DIM, _LONGEST = 8, 4


def _sparse(batch_size: int) -> Sample:
    return Sample(batch(batch_size))


def padded(rows: JaggedTensor) -> torch.Tensor:
    """``[B, 4, D]``; zeros where there is no id."""
    return rows.to_padded_dense(_LONGEST)


class SequenceTower(nn.Module):
    """A collection and a layer: what most cases are built around."""

    def __init__(self, ec: nn.Module | None = None) -> None:
        super().__init__()
        self.ec = ec or sequences()
        self.linear = nn.Linear(_DIM, 3)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        rows = self.ec(features)
        return self.linear(padded(rows["f1"]) + padded(rows["f2"]) * padded(rows["f3"]))


# What code does with a JaggedTensor


class _TakesValues(SequenceTower):
    def forward(self, features: KeyedJaggedTensor) -> Any:
        rows = self.ec(features)
        return self.linear(rows["f1"].values()), rows["f2"].lengths(), rows["f3"].offsets()


class _ListOfDense(SequenceTower):
    def forward(self, features: KeyedJaggedTensor) -> Any:
        return [self.linear(sample).sum() for sample in self.ec(features)["f1"].to_dense()]


class _WithIndices(SequenceTower):
    """The ids are weights of the output; padding is told from them."""

    def __init__(self) -> None:
        super().__init__(sequences(need_indices=True))

    def forward(self, features: KeyedJaggedTensor) -> Any:
        rows = self.ec(features)["f3"]
        return self.linear(rows.values()) * (rows.weights() + 1).unsqueeze(1), rows


# Tables


class _BesidePooled(SequenceTower):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = collection()

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(features)["f1"]
        return super().forward(features) * self.linear(pooled).unsqueeze(1)


class _TiedToPooled(_BesidePooled):
    """A pooled and a sequence table of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc.embedding_bags["t1"].weight = self.ec.embeddings["s1"].weight


class _TiedToOutput(SequenceTower):
    """Scores of all items, by the rows of their table."""

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        hidden = padded(self.ec(features)["f1"]).sum(dim=1)
        return nn.functional.linear(hidden, self.ec.embeddings["s1"].weight)


class _OneCollectionPerDim(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ec_dict = nn.ModuleDict(
            {
                str(dim): EmbeddingCollection([sequence_table(f"s_{dim}", [feature], dim=dim)])
                for feature, dim in (("f1", 1), ("f2", 5), ("f3", 16))
            }
        )

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        of_feature = {}
        for ec in self.ec_dict.values():
            for feature, rows in ec(features).items():
                of_feature[feature] = rows
        return torch.cat([padded(of_feature[feature]) for feature in ("f3", "f1", "f2")], dim=2)


def sharing() -> EmbeddingCollection:
    """Both tables read ``f2``."""
    return EmbeddingCollection([sequence_table("b", ["f3", "f2"]), sequence_table("a", ["f2"])])


class _SharedFeatures(SequenceTower):
    def __init__(self) -> None:
        super().__init__(sharing())

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        rows = self.ec(features)
        return self.linear(padded(rows["f2@a"]) - padded(rows["f2@b"]) + padded(rows["f3"]))


def _frozen() -> nn.Module:
    tower = SequenceTower()
    tower.ec.embeddings["s2"].weight.requires_grad_(False)
    return tower


class _Subclass(EmbeddingCollection):
    def names(self) -> list[str]:
        return [name for names in self.embedding_names_by_table() for name in names]


class _UsesSubclass(SequenceTower):
    def __init__(self) -> None:
        super().__init__(_Subclass([sequence_table("s1", ["f1", "f2", "f3"])]))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        rows = self.ec(features)
        return self.linear(torch.cat([rows[name].values() for name in self.ec.names()]))


# Calls


class _CalledTwice(SequenceTower):
    def forward(self, features: KeyedJaggedTensor, other: KeyedJaggedTensor) -> torch.Tensor:
        return self.linear(padded(self.ec(features)["f1"]) - 2 * padded(self.ec(other)["f2"]))


class _Hooked(SequenceTower):
    def __init__(self) -> None:
        super().__init__()
        self.ec.register_forward_hook(_only_the_first)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.linear(padded(self.ec(features)["f1"]))


def _only_the_first(module: nn.Module, args: Any, output: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
    return {"f1": output["f1"]}


class _VariableBatch(SequenceTower):
    """``f2`` has half as many samples as the others; unsharded, they stay as they are."""

    def forward(self, features: KeyedJaggedTensor) -> Any:
        rows = self.ec(features)
        return self.linear(padded(rows["f1"])), self.linear(padded(rows["f2"]))


def _variable_batch(batch_size: int) -> Sample:
    strides = [batch_size, batch_size // 2, batch_size]
    lengths = torch.randint(0, _LONGEST + 1, (sum(strides),))
    features = KeyedJaggedTensor(
        ["f1", "f2", "f3"],
        torch.randint(0, 20, (int(lengths.sum()),)),
        lengths=lengths,
        stride_per_key_per_rank=[[stride] for stride in strides],
        inverse_indices=(["f1", "f2", "f3"], torch.stack([torch.arange(batch_size) % stride for stride in strides])),
    )
    return Sample(features)


# Recommenders


class SASRec(nn.Module):
    """Self-attention over the items that a user has seen, each of which sees those before it; scores of the next item
    are products with the rows of the same table.
    """

    def __init__(self) -> None:
        super().__init__()
        self.items = EmbeddingCollection([sequence_table("item", ["f1", "f2", "f3"])])
        self.positions = nn.Parameter(torch.randn(_LONGEST, _DIM))
        self.attention = nn.MultiheadAttention(_DIM, 2, batch_first=True)
        self.norm = nn.LayerNorm(_DIM)
        self.register_buffer("is_later", torch.ones(_LONGEST, _LONGEST, dtype=torch.bool).triu(1))

    def forward(self, features: KeyedJaggedTensor) -> Any:
        rows = self.items(features)  # seen, taken next, and not taken
        seen = padded(rows["f1"]) + self.positions
        hidden = self.norm(seen + self.attention(seen, seen, seen, attn_mask=self.is_later, need_weights=False)[0])
        return (hidden * padded(rows["f2"])).sum(dim=2), (hidden * padded(rows["f3"])).sum(dim=2)


class BERT4Rec(nn.Module):
    """A bidirectional encoder over padded histories, as TorchRec's example builds it; logits of all items."""

    def __init__(self) -> None:
        super().__init__()
        self.ec = EmbeddingCollection([sequence_table("item", ["f1"])])
        self.position = nn.Parameter(torch.randn(_LONGEST, _DIM))
        self.encoder = nn.TransformerEncoderLayer(_DIM, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(_DIM, 20)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        rows = self.ec(features)["f1"]
        dense = torch.ops.fbgemm.jagged_2d_to_dense(rows.values(), rows.offsets(), _LONGEST)
        return self.out(self.encoder(dense + self.position))


class HSTU(nn.Module):
    """Pointwise attention over the histories and candidates of one merged batch: a candidate sees the history and
    itself, but no other candidate.
    """

    def __init__(self) -> None:
        super().__init__()
        tables = [sequence_table("item", ["f1", "f2"]), sequence_table("action", ["f3"])]
        self.collection = EmbeddingCollection(tables)
        self.uvqk = nn.Linear(_DIM, 4 * _DIM)
        self.out = nn.Linear(_DIM, _DIM)
        seen = torch.ones(2 * _LONGEST, 2 * _LONGEST).tril()
        seen[_LONGEST:, _LONGEST:] = torch.eye(_LONGEST)
        self.register_buffer("seen", seen)

    def forward(self, features: KeyedJaggedTensor) -> Any:
        rows = self.collection(features)
        history, candidates, actions = rows["f1"], rows["f2"], rows["f3"]
        x = torch.cat([padded(history) + padded(actions), padded(candidates)], dim=1)
        u, v, q, k = nn.functional.silu(self.uvqk(x)).chunk(4, dim=2)
        attended = nn.functional.silu(q @ k.transpose(1, 2)) * self.seen @ v / _LONGEST
        encoded = self.out(attended * u)[:, _LONGEST:]
        of_candidates = torch.ops.fbgemm.dense_to_jagged(encoded, [candidates.offsets()])[0]
        return (of_candidates * candidates.values()).sum(dim=1), candidates.lengths()


class DIN(nn.Module):
    """Attention of a target over the history, beside pooled features of the user."""

    def __init__(self) -> None:
        super().__init__()
        self.ec = EmbeddingCollection([sequence_table("item", ["f1", "f2"])])
        self.ebc = EmbeddingBagCollection(tables=[table("user", ["f3"])])
        self.over = nn.Linear(3 * _DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        rows, users = self.ec(features), self.ebc(features)["f3"]
        history, target = padded(rows["f1"]), rows["f2"].to_padded_dense(1)
        attended = ((history * target).sum(dim=2, keepdim=True) * history).sum(dim=1)
        return self.over(torch.cat([attended, target.squeeze(1), users], dim=1))


SEQUENCES = [
    Case("sequence_alone", sequences, _sparse),
    Case("sequence_tower", SequenceTower, _sparse),
    Case("sequence_int32", SequenceTower, lambda b: Sample(batch(b, dtype=torch.int32))),
    Case("sequence_values", _TakesValues, _sparse),
    Case("sequence_to_dense", _ListOfDense, _sparse, whole_graph="untraceable_root"),
    Case("sequence_need_indices", _WithIndices, _sparse),
    Case("sequence_and_pooled", _BesidePooled, _sparse),
    Case("sequence_tied_to_pooled", _TiedToPooled, _sparse),
    Case("sequence_tied_to_output", _TiedToOutput, _sparse),
    Case("sequence_dims", _OneCollectionPerDim, _sparse),
    Case("sequence_shared_features", _SharedFeatures, _sparse),
    Case("sequence_frozen_table", _frozen, _sparse),
    # The standard collection sums the gradients of an id in float16; converted, they are summed in float32.
    Case("sequence_half", lambda: _with_half_tables(SequenceTower()), _sparse, rtol=2e-3, atol=2e-4),
    Case("sequence_subclass", _UsesSubclass, _sparse),
    Case("sequence_called_twice", _CalledTwice, lambda b: Sample(batch(b), other=batch(b))),
    Case("sequence_hooks", _Hooked, _sparse),
    Case("sequence_variable_batch", _VariableBatch, _variable_batch),
    Case("sasrec", SASRec, _sparse),
    Case("bert4rec", BERT4Rec, _sparse),
    Case("hstu", HSTU, _sparse),
    Case("din", DIN, _sparse),
]


def _with_half_tables(tower: SequenceTower) -> nn.Module:
    tower.ec.half()
    return tower
