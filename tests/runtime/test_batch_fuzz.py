"""Hundreds of batches, most of them wrong: each is answered as by the standard collection, or refused in one way."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, PoolingType

import recfx
from recfx.errors import RecfxError
from tests.builders.collections import table
from tests.builders.optimizers import attach

KEYS, ROWS, RATE = ("a", "b", "c"), 20, 0.05
HUGE = (-1, -3, 1, 5, 2**31, 2**40, -(2**62))

Parts = dict[str, Any]
"""The arguments of a ``KeyedJaggedTensor``."""


def lengths_of(parts: Parts, chance: random.Random) -> None:
    change, position = chance.choice(HUGE), chance.randrange(parts["lengths"].numel())
    parts["lengths"][position] += change
    if chance.random() < 0.5:  # they add up to the number of ids all the same
        parts["lengths"][position - 1] -= change


def other_lengths(parts: Parts, chance: random.Random) -> None:
    lengths = parts["lengths"]
    dtype = chance.choice([torch.int32, torch.int16, torch.uint8, torch.float32])
    strided = torch.stack([lengths, lengths + 1], 1)[:, 0]
    parts["lengths"] = chance.choice([lengths[:-1], torch.cat([lengths, lengths[:1]]), lengths.to(dtype), strided])


def offsets(parts: Parts, chance: random.Random) -> None:
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), parts.pop("lengths").cumsum(0)]) + chance.choice(
        [0, 0, 2, -1]
    )
    if chance.random() < 0.5:
        starts[chance.randrange(starts.numel())] += chance.choice(HUGE)
    parts["offsets"] = chance.choice([starts, starts, starts[:-1], starts.int()])


def ids(parts: Parts, chance: random.Random) -> None:
    values = parts["values"].clone()
    if values.numel():
        values[chance.randrange(values.numel())] = chance.choice([ROWS, -1, ROWS + 5, 2**31 - 1])
    parts["values"] = values


def other_ids(parts: Parts, chance: random.Random) -> None:
    values = parts["values"]
    dtype = chance.choice([torch.int32, torch.int8, torch.bool, torch.uint64, torch.float32, torch.complex64])
    strided = torch.stack([values, values], 1)[:, 0]
    parts["values"] = chance.choice(
        [values[:-1], values[:0], torch.cat([values, values[:1]]), values.to(dtype), values.view(-1, 1), strided]
    )


def weights(parts: Parts, chance: random.Random) -> None:
    given = parts["weights"]
    if given is None:
        parts["weights"] = torch.rand(parts["values"].numel())
        return
    dtype = chance.choice([torch.int64, torch.complex64])
    strided, learned = torch.stack([given, given], 1)[:, 1], given.clone().requires_grad_()
    parts["weights"] = chance.choice(
        [
            None,
            given[:-1],
            given[:0],
            torch.cat([given, given]),
            given.to(dtype),
            given * float("nan"),
            strided,
            learned,
        ]
    )


def keys(parts: Parts, chance: random.Random) -> None:
    given = parts["keys"]
    parts["keys"] = chance.choice(
        [given[:-1], [*given[:-1], "z"], [*given, "z"], [given[-1], *given[1:]], [*given[:-1], 7]]
    )


def sizes(parts: Parts, chance: random.Random) -> None:
    """Batch sizes of keys, with inverse indices that may be wrong."""
    count = parts["lengths"].numel() if "lengths" in parts else parts["offsets"].numel() - 1
    cuts = sorted(chance.randint(0, count) for _ in parts["keys"][1:])
    of_keys = [end - begin for begin, end in zip([0, *cuts], [*cuts, count], strict=True)]
    inverse = torch.tensor([[chance.randrange(max(1, size)) for _ in range(4)] for size in of_keys])
    if chance.random() < 0.3:
        inverse = chance.choice([inverse + 50, inverse - 1, inverse.float(), inverse[:-1], inverse.int()])
    parts["stride_per_key_per_rank"] = [[size] for size in of_keys]
    parts["inverse_indices"] = (list(parts["keys"]), inverse)


CHANGES: tuple[Callable[[Parts, random.Random], None], ...] = (
    lengths_of, lengths_of, other_lengths, offsets, ids, other_ids, weights, keys, sizes,
)  # fmt: skip


def batch(seed: int, is_weighted: bool) -> tuple[Parts, list[str]]:
    """What a batch is made of, and the changes that may make it wrong."""
    chance, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    names = [*KEYS, *chance.sample(["x", "y"], chance.randint(0, 2))]
    chance.shuffle(names)
    lengths = torch.randint(0, 4, (len(names) * chance.choice([1, 2, 3, 5]),), generator=draw)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=draw)
    scales = torch.rand(values.numel(), generator=draw) if is_weighted else None
    parts: Parts = {"keys": names, "values": values, "weights": scales, "lengths": lengths}
    changes = chance.sample(CHANGES, chance.choice([0, 1, 1, 1, 2]))
    done = []
    for change in sorted(set(changes), key=CHANGES.index):
        if change is not sizes or parts.get("lengths", parts.get("offsets")).dim() == 1:
            change(parts, chance)
            done.append(change.__name__)
    return parts, done


def is_dangerous(parts: Parts) -> bool:
    """Whether the standard collection reads what is not its own, so that it is not asked: ours must refuse."""
    counts = parts["lengths"] if "lengths" in parts else parts["offsets"].diff()
    return bool((counts < 0).any())


def train_on(model: nn.Module, parts: Parts) -> torch.Tensor | Exception:
    """One step of SGD, by hand for tables without an optimizer in backward."""
    given = dict(parts)
    if isinstance(given["weights"], torch.Tensor):
        learns = given["weights"].requires_grad
        given["weights"] = given["weights"].detach().clone().requires_grad_(learns)
    try:
        pooled: torch.Tensor = model(KeyedJaggedTensor(**given)).values()
        (pooled * torch.linspace(-1, 2, pooled.numel()).view_as(pooled)).sum().backward()
    except Exception as error:
        return error
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.data.add_(parameter.grad, alpha=-RATE)
            parameter.grad = None
    return pooled.detach()


def standard(is_weighted: bool) -> EmbeddingBagCollection:
    torch.manual_seed(5)
    mean = PoolingType.SUM if is_weighted else PoolingType.MEAN
    tables = [table("t1", ["a", "b"], dim=4), table("t2", ["b"], pooling=mean), table("t3", ["c"], dim=4)]
    return EmbeddingBagCollection(tables=tables, is_weighted=is_weighted)


def converted(is_weighted: bool, fused: bool, **options: Any) -> Any:
    plain = standard(is_weighted)
    if fused:
        attach(plain, torch.optim.SGD, lr=RATE)
    return recfx.convert(plain, **options)


MODELS: dict[str, Any] = {
    "adopted, fused": {"fused": True},
    "adopted, reference": {"fused": True, "backend": "reference"},
    "static": {"fused": False, "hashing": None},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_weighted", [False, True], ids=["unweighted", "weighted"])
def test_every_batch(is_weighted: bool, name: str) -> None:
    tried, wrong = 0, []
    for seed in range(250):
        parts, changes = batch(seed, is_weighted)
        try:
            KeyedJaggedTensor(**parts)
        except Exception:
            continue  # never reaches a collection
        tried += 1
        oracle, model = standard(is_weighted), converted(is_weighted, **MODELS[name])
        expected = RecfxError("unasked") if is_dangerous(parts) else train_on(oracle, parts)
        answer = train_on(model, parts)
        if isinstance(answer, Exception):
            problem = "" if isinstance(answer, RecfxError) else repr(answer)
            if not problem and isinstance(expected, torch.Tensor):
                problem = f"refused: {answer}"
        elif isinstance(expected, Exception):
            problem = f"answered, but the standard collection raises {expected!r}"
        else:
            same = answer.shape == expected.shape and torch.allclose(answer, expected, 1e-4, 1e-5, equal_nan=True)
            weights_of = zip(oracle.parameters(), model.parameters(), strict=True)
            same = same and all(torch.allclose(one, other, 1e-4, 1e-4, equal_nan=True) for one, other in weights_of)
            problem = "" if same else "another answer"
        if problem:
            wrong.append(f"seed {seed}, {changes}: {problem[:300]}")
    assert not wrong, "\n".join([str(len(wrong)), *wrong[:12]])
    assert tried > 180
