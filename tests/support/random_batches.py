"""Random batches, most of them wrong in one or two places, and what is expected of a collection that gets one.

Where the answer differs from the standard collection's on purpose, the batch says so (``Batch.expected``).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torchrec import KeyedJaggedTensor

ROWS = 20
KEYS = ["a", "b", "c"]
SMALL = (torch.int8, torch.uint8, torch.int16)


@dataclass
class Batch:
    """What a batch is built from.

    ``expected``: "as_standard"; "refused", where the standard collection is not asked (it would read what it should
    not); "same_or_refused"; "anything" but an error of another kind.
    """

    keys: list[Any]
    values: Any
    lengths: Any
    weights: Any = None
    offsets: Any = None
    more: dict[str, Any] = field(default_factory=dict)
    expected: str = "as_standard"
    ids_out_of_range: bool = False
    notes: list[str] = field(default_factory=list)

    def build(self, *, for_oracle: bool = False) -> Any:
        """The batch with weights of its own. The oracle gets lengths and weights in the types that it does not wrap."""
        lengths, offsets, weights = self.lengths, self.offsets, self.weights
        if for_oracle:
            lengths, offsets = _widened(lengths), _widened(offsets)
        if isinstance(weights, torch.Tensor):
            if for_oracle and weights.is_floating_point():
                weights = weights.float()
            weights = weights.detach().clone().requires_grad_(weights.requires_grad)
        return KeyedJaggedTensor(list(self.keys), self.values, weights, lengths=lengths, offsets=offsets, **self.more)


def _widened(tensor: Any) -> Any:
    is_small = isinstance(tensor, torch.Tensor) and tensor.dtype in SMALL
    return tensor.to(torch.int64) if is_small else tensor


Change = Callable[[random.Random, Batch], None]


def make_batch(seed: int, is_weighted: bool) -> Batch:
    """The batch of a seed; not all can be built: ``KeyedJaggedTensor`` refuses some itself."""
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    keys = list(KEYS)
    if chance.random() < 0.5:
        keys += chance.sample(["x", "y"], chance.randint(0, 2))
        chance.shuffle(keys)
    size = chance.choice([1, 2, 3, 5])
    lengths = torch.randint(0, 4, (len(keys) * size,), generator=generator)
    if chance.random() < 0.05:
        lengths.zero_()
    total = int(lengths.sum())
    values = torch.randint(0, ROWS, (total,), generator=generator)
    weights = torch.rand(total, generator=generator) if is_weighted or chance.random() < 0.2 else None
    batch = Batch(keys, values, lengths, weights)
    for _ in range(chance.choice([0, 1, 1, 1, 1, 2, 2, 3])):
        change = chance.choice(CHANGES)
        batch.notes.append(change.__name__)
        change(chance, batch)
    if _has_negative_length(batch):  # the standard collection would read what is not there
        batch.expected = "refused"
    weights = batch.weights
    has_data = isinstance(weights, torch.Tensor) and not weights.is_meta and weights.layout == torch.strided
    if "inverse_indices" in batch.more and has_data and bool(weights.isnan().any()):
        batch.expected = "anything"  # only the standard collection pools bags that no sample reads, 0 times nan
    return batch


def _has_negative_length(batch: Batch) -> bool:
    if _plain(batch):
        return bool((batch.lengths.to(torch.int64) < 0).any())
    offsets = batch.offsets if batch.lengths is None else None
    return offsets is not None and not offsets.is_meta and bool((offsets.to(torch.int64).diff() < 0).any())


def _index(chance: random.Random, tensor: Any) -> int | None:
    if isinstance(tensor, torch.Tensor) and tensor.dim() == 1 and tensor.numel() > 0 and not tensor.is_meta:
        return chance.randrange(tensor.numel()) if tensor.layout == torch.strided else None
    return None


def _true_offsets(batch: Batch) -> torch.Tensor:
    flat = batch.lengths.reshape(-1).to(torch.int64)
    return torch.cat([torch.zeros(1, dtype=torch.int64), flat.cumsum(0)])


def _plain(batch: Batch) -> bool:
    lengths = batch.lengths
    return (
        isinstance(lengths, torch.Tensor)
        and lengths.layout == torch.strided
        and not lengths.is_meta
        and lengths.dtype in (torch.int64, torch.int32, *SMALL)
    )


def length_of_a_bag(chance: random.Random, batch: Batch) -> None:
    position = _index(chance, batch.lengths)
    if position is None or not _plain(batch):
        return
    info = torch.iinfo(batch.lengths.dtype)
    far = [2**40, 1 - 2**40, 2**31, 2**62, info.max, info.min, 10**6]
    value = chance.choice([-1, -3, 0, 1, 5, *far])
    if info.min <= value <= info.max:
        batch.lengths = batch.lengths.clone()
        batch.lengths[position] = value


def lengths_that_cancel_out(chance: random.Random, batch: Batch) -> None:
    """They add up to the number of ids all the same, one key's or several keys'; in int64 or by wrapping around."""
    if _index(chance, batch.lengths) is None or not _plain(batch) or batch.lengths.numel() < 2:
        return
    far = chance.choice([1, 2, 7, 2**40])
    if far > torch.iinfo(batch.lengths.dtype).max:
        far = 7
    one, other = chance.sample(range(batch.lengths.numel()), 2)
    batch.lengths = batch.lengths.clone().to(torch.int64)
    batch.lengths[one] += far
    batch.lengths[other] -= far


def number_of_lengths(chance: random.Random, batch: Batch) -> None:
    if _index(chance, batch.lengths) is None:
        return
    lengths = batch.lengths
    batch.lengths = chance.choice([lengths[:-1], lengths[1:], torch.cat([lengths, lengths[:1]]), lengths[:0]])
    if batch.lengths.numel() == 0:
        batch.expected = "anything"  # a batch without samples: ours has an answer


def dtype_of_lengths(chance: random.Random, batch: Batch) -> None:
    if _plain(batch):
        batch.lengths = batch.lengths.to(chance.choice([torch.int32, *SMALL, torch.float32, torch.bool]))


def form_of_lengths(chance: random.Random, batch: Batch) -> None:
    if not _plain(batch) or batch.lengths.dim() != 1 or not batch.keys or batch.lengths.numel() % len(batch.keys):
        return
    lengths, keys = batch.lengths, len(batch.keys)
    strided = torch.stack([lengths, lengths + 1], 1)[:, 0]
    forms = [
        lambda: lengths.view(keys, -1),
        lambda: lengths.view(-1, 1),
        lambda: lengths.view(-1, keys).t(),
        lambda: strided,
        lambda: lengths.to("meta"),
        lambda: lengths.to_sparse(),
        lambda: lengths.view(1, keys, -1),
    ]
    if lengths.numel() == 0:
        return
    batch.lengths = chance.choice(forms)()
    if batch.lengths.is_meta or batch.lengths.layout != torch.strided:
        batch.expected = "refused"


def offsets_instead(chance: random.Random, batch: Batch) -> None:
    """Right ones, shifted ones, or some that are wrong in one place."""
    if not _plain(batch) or batch.lengths.dim() != 1:
        return
    offsets = _true_offsets(batch) + chance.choice([0, 0, 0, 2, -1, 2**40])
    if chance.random() < 0.4:
        offsets[chance.randrange(offsets.numel())] += chance.choice([1, -1, 3, -5, 2**40, -(2**62)])
    elif chance.random() < 0.3:
        offsets = chance.choice([offsets[:-1], offsets[1:], offsets[:0], offsets.view(1, -1), offsets.to("meta")])
    if not offsets.is_meta and offsets.numel() and int(offsets.abs().max()) < 100:
        offsets = offsets.to(chance.choice([torch.int64, torch.int32, torch.int16, torch.int8]))
    batch.offsets, batch.lengths = offsets, None
    if offsets.is_meta:
        batch.expected = "refused"
    elif offsets.numel() < 2:
        batch.expected = "anything"


def number_of_ids(chance: random.Random, batch: Batch) -> None:
    if _index(chance, batch.values) is not None:
        values = batch.values
        batch.values = chance.choice([values[:-1], values[:0], torch.cat([values, values[:1]])])


def id_out_of_range(chance: random.Random, batch: Batch) -> None:
    position = _index(chance, batch.values)
    if position is not None and batch.values.dtype in (torch.int32, torch.int64):
        batch.values = batch.values.clone()
        batch.values[position] = chance.choice([ROWS, -1, ROWS + 5, -(2**31), 2**31 - 1])
        batch.ids_out_of_range = True


def dtype_of_ids(chance: random.Random, batch: Batch) -> None:
    if _index(chance, batch.values) is not None:
        others = [torch.int32, *SMALL, torch.bool, torch.uint16, torch.uint64, torch.float32, torch.complex64]
        batch.values = batch.values.to(chance.choice(others))


def form_of_ids(chance: random.Random, batch: Batch) -> None:
    values = batch.values
    if _index(chance, values) is None or values.dtype not in (torch.int32, torch.int64):
        return
    batch.values = chance.choice(
        [values.view(-1, 1), values.view(1, -1), values[0], values.to("meta"), values.to_sparse(),
         torch.stack([values, values], 1)[:, 0], values.tolist(), None, values[:1].expand(values.numel())]
    )  # fmt: skip
    if not isinstance(batch.values, torch.Tensor) or batch.values.is_meta or batch.values.layout != torch.strided:
        batch.expected = "refused"


def size_of_weights(chance: random.Random, batch: Batch) -> None:
    weights = batch.weights
    if _index(chance, weights) is not None:
        batch.weights = chance.choice(
            [weights[:-1], weights[:0], torch.cat([weights, weights]), weights.view(-1, 1), weights[0], None]
        )


def form_of_weights(chance: random.Random, batch: Batch) -> None:
    weights = batch.weights
    if _index(chance, weights) is None or weights.requires_grad or weights.dtype != torch.float32:
        return
    others = [torch.float64, torch.float16, torch.int64, torch.bool, torch.complex64]
    batch.weights = chance.choice(
        [*(weights.to(dtype) for dtype in others), weights.to("meta"), weights.to_sparse(), weights * float("nan"),
         torch.stack([weights, weights], 1)[:, 1], -weights, weights[:1].expand(weights.numel()),
         torch.complex(weights, weights).conj().imag]
    )  # fmt: skip
    if batch.weights.is_meta or batch.weights.layout != torch.strided:
        batch.expected = "same_or_refused" if batch.expected == "as_standard" else batch.expected
        batch.notes.append("weights_without_data")


def weights_that_learn(chance: random.Random, batch: Batch) -> None:
    weights = batch.weights
    if _index(chance, weights) is not None and weights.dtype == torch.float32:
        batch.weights = weights.detach().clone().requires_grad_()


def explicit_batch_size(chance: random.Random, batch: Batch) -> None:
    if isinstance(batch.lengths, torch.Tensor):
        right = batch.lengths.numel() // max(1, len(batch.keys))
        batch.more["stride"] = chance.choice([right, right, right + 1, 0, -1, right * 2])


def other_keys(chance: random.Random, batch: Batch) -> None:
    keys = list(batch.keys)
    if not keys:
        return
    at = chance.randrange(len(keys))
    batch.keys = chance.choice(
        [keys[:-1], [], [*keys[:at], "z", *keys[at + 1 :]], [*keys[:at], chance.choice(keys), *keys[at + 1 :]],
         [*keys, "z"], [*keys[:at], 7, *keys[at + 1 :]]]
    )  # fmt: skip


def batch_sizes_of_keys(chance: random.Random, batch: Batch) -> None:
    """Variable batches, with inverse indices that may be wrong."""
    if not isinstance(batch.lengths, torch.Tensor) or batch.lengths.dim() != 1 or not batch.keys:
        return
    keys, bags = len(batch.keys), batch.lengths.numel()
    cuts = sorted(chance.randint(0, bags) for _ in range(keys - 1))
    sizes = [end - begin for begin, end in zip([0, *cuts], [*cuts, bags], strict=True)]
    if chance.random() < 0.3 and bags % keys == 0:
        sizes = [bags // keys] * keys
    if chance.random() < 0.15:
        sizes[0] += chance.choice([1, -1])
    ranks: Any = [[size] for size in sizes]
    if chance.random() < 0.1:
        ranks = chance.choice([ranks[:-1], torch.tensor(sizes), [[size - 1, 1] for size in sizes]])
    batch.more.pop("stride", None)
    batch.more["stride_per_key_per_rank"] = ranks
    if chance.random() < 0.8:
        _inverse(chance, batch, sizes)


def inverse_indices(chance: random.Random, batch: Batch) -> None:
    if isinstance(batch.lengths, torch.Tensor) and batch.keys and "stride_per_key_per_rank" not in batch.more:
        _inverse(chance, batch, [batch.lengths.numel() // len(batch.keys)] * len(batch.keys))


def _inverse(chance: random.Random, batch: Batch, sizes: list[int]) -> None:
    samples = chance.choice([0, 1, 4, 6])
    names = list(batch.keys)
    indices = torch.tensor(
        [[chance.randrange(max(1, size)) for _ in range(samples)] for size in sizes], dtype=torch.int64
    ).view(len(sizes), samples)
    if chance.random() < 0.3:
        order = list(range(len(names)))
        chance.shuffle(order)
        names, indices = [names[position] for position in order], indices[order]
    if chance.random() < 0.3:
        wrong = indices.clone()
        if wrong.numel():
            wrong[chance.randrange(wrong.shape[0]), chance.randrange(samples)] = chance.choice([-1, 50, 2**40])
        indices = chance.choice(
            [wrong, indices.float(), indices[:-1], indices.view(-1), indices.int(), indices.unsqueeze(2),
             indices.to("meta"), torch.cat([indices, indices])]
        )  # fmt: skip
        if indices.is_meta and indices.numel():
            batch.expected = "refused"
        elif indices.is_meta or indices.dim() != 2:
            batch.expected = "same_or_refused" if batch.expected == "as_standard" else batch.expected
    if chance.random() < 0.1:
        names = names[1:]
    batch.more["inverse_indices"] = (names, indices)


CHANGES: list[Change] = [
    length_of_a_bag, lengths_that_cancel_out, number_of_lengths, dtype_of_lengths, form_of_lengths, offsets_instead,
    number_of_ids, id_out_of_range, dtype_of_ids, form_of_ids, size_of_weights, form_of_weights,
    weights_that_learn, explicit_batch_size, other_keys, batch_sizes_of_keys, inverse_indices,
]  # fmt: skip
