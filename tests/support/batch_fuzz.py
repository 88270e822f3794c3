"""Random batches, most of them wrong in one or two places, and what a collection must make of each.

A batch is either answered and learnt from as by the standard collection, or refused with one ``RecfxError``. Where the
standard collection refuses, so must ours. Where the two differ on purpose, the batch says so (``Batch.expected``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

import recfx
from recfx.errors import RecfxError
from tests.builders.optimizers import attach
from tests.support.random_batches import KEYS, ROWS, Batch, make_batch

RATE = 0.05


def tables(is_weighted: bool) -> list[EmbeddingBagConfig]:
    """A shared feature, a table of two features, three widths, SUM and MEAN."""
    mean = PoolingType.SUM if is_weighted else PoolingType.MEAN
    return [
        EmbeddingBagConfig(name="t1", num_embeddings=ROWS, embedding_dim=4, feature_names=["a", "b"]),
        EmbeddingBagConfig(name="t2", num_embeddings=ROWS, embedding_dim=8, feature_names=["b"], pooling=mean),
        EmbeddingBagConfig(name="t3", num_embeddings=ROWS, embedding_dim=4, feature_names=["c"]),
    ]


def standard(is_weighted: bool) -> EmbeddingBagCollection:
    torch.manual_seed(5)
    return EmbeddingBagCollection(tables=tables(is_weighted), is_weighted=is_weighted)


# Answers


@dataclass
class Answer:
    """What a batch has come to: ``error``, or the pooled values and the gradient of the batch's weights."""

    error: Exception | None = None
    pooled: torch.Tensor | None = None
    weight_gradient: torch.Tensor | None = None


def train_on(model: nn.Module, features: Any) -> Answer:
    """One step of SGD; of tables without an optimizer in backward by hand."""
    try:
        pooled = model(features).values()
        if pooled.requires_grad:
            (pooled * torch.linspace(-1, 2, pooled.numel()).view_as(pooled)).sum().backward()
    except Exception as error:
        return Answer(error)
    finally_step(model)
    weights = features.weights_or_none()
    gradient = None if weights is None or not weights.requires_grad else weights.grad
    return Answer(None, pooled.detach(), gradient)


def finally_step(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.data.add_(parameter.grad, alpha=-RATE)
            parameter.grad = None


def ask_standard(oracle: nn.Module, batch: Batch, is_weighted: bool) -> tuple[str, Answer]:
    """What is expected of ours, and the standard collection's answer where that is compared."""
    expected = batch.expected
    if expected == "same_or_refused" and is_weighted and "weights_without_data" in batch.notes:
        expected = "refused"  # the standard collection would multiply by what lies in memory
    if expected in ("refused", "anything"):
        return expected, Answer()
    answer = train_on(oracle, batch.build(for_oracle=True))
    if answer.error is not None:
        sizes = batch.more.get("stride_per_key_per_rank")
        no_samples = isinstance(batch.lengths, torch.Tensor) and batch.lengths.numel() == 0
        # Samples of no key at all, or a key without bags of its own: ours has an answer.
        return ("anything" if no_samples or (sizes is not None and expected != "refused") else "refused"), answer
    return expected, answer


def judge(expected: str, of_standard: Answer, answer: Answer, *, any_id: bool = False) -> str:
    """What is wrong with an answer; "" if nothing is.

    ``any_id``: no id is out of range.
    """
    if answer.error is not None and not isinstance(answer.error, RecfxError):
        return f"raw {type(answer.error).__name__}: {answer.error}"
    if expected == "anything" or (any_id and expected == "refused"):
        return ""
    if expected == "refused":
        return "" if answer.error is not None else f"answered, but the standard collection raises {of_standard.error!r}"
    if answer.error is not None:
        return "" if expected == "same_or_refused" else f"refused: {answer.error}"
    assert answer.pooled is not None
    assert of_standard.pooled is not None
    for name, ours, theirs in (
        ("output", answer.pooled, of_standard.pooled),
        ("gradient of the weights", answer.weight_gradient, of_standard.weight_gradient),
    ):
        if (ours is None) != (theirs is None):
            return f"{name}: {ours} instead of {theirs}"
        if ours is not None and theirs is not None:
            if ours.shape != theirs.shape:
                return f"{name}: shape {list(ours.shape)} instead of {list(theirs.shape)}"
            if not torch.allclose(ours.float(), theirs.float(), rtol=1e-4, atol=1e-5, equal_nan=True):
                return f"{name}: {ours} instead of {theirs}"
    return ""


# Collections


def with_sgd(model: nn.Module) -> nn.Module:
    attach(model, torch.optim.SGD, lr=RATE)
    return model


def everything(is_weighted: bool) -> KeyedJaggedTensor:
    """Every id of every feature, each in a bag of its own."""
    count = len(KEYS) * ROWS
    return KeyedJaggedTensor(
        list(KEYS),
        torch.arange(ROWS).repeat(len(KEYS)),
        torch.ones(count) if is_weighted else None,
        lengths=torch.ones(count, dtype=torch.int64),
    )


def hashed(is_weighted: bool, oracle: nn.Module) -> recfx.HashEmbeddingBagCollection:
    """Its tables are full of the ids 0 to 19, whose weights are those of the oracle."""
    converted = recfx.convert(with_sgd(standard(is_weighted)), hashing=recfx.HashConfig(dense_rows=0, buckets=1))
    assert isinstance(converted, recfx.HashEmbeddingBagCollection)
    with torch.no_grad():
        converted(everything(is_weighted))
        for config in tables(is_weighted):
            rows = converted.index(config.name).find(torch.arange(ROWS))
            converted.weight(config.name)[rows] = oracle.embedding_bags[config.name].weight
    return converted


def weights_by_id(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of an unsharded collection."""
    weights = {}
    for name, bag in model.embedding_bags.items():
        weight = bag.weight.detach()
        indexes = getattr(model, "hash_indexes", {})
        weights[name] = weight[indexes[name].find(torch.arange(ROWS))] if name in indexes else weight
    return weights


def unsharded(is_weighted: bool, oracle: nn.Module) -> dict[str, nn.Module]:
    """By name; all start with the oracle's weights."""
    dense = recfx.HashConfig()
    return {
        "adopted, fused": recfx.convert(with_sgd(standard(is_weighted)), hashing=dense),
        "adopted, reference": recfx.convert(with_sgd(standard(is_weighted)), hashing=dense, backend="reference"),
        "static": recfx.convert(standard(is_weighted), hashing=None),
        "hashed, fused": hashed(is_weighted, oracle),
    }


def run_unsharded(seeds: range, is_weighted: bool) -> tuple[int, list[str]]:
    """Try the batches of some seeds; how many could be built, and what was wrong."""
    tried, wrong = 0, []
    oracle = standard(is_weighted)
    models = unsharded(is_weighted, oracle)
    for count, seed in enumerate(seeds):
        if count and count % 100 == 0:  # a weight that became nan hides what comes after it; differences add up
            oracle = standard(is_weighted)
            models = unsharded(is_weighted, oracle)
        batch = make_batch(seed, is_weighted)
        try:
            batch.build()
        except Exception:
            continue  # never reaches a collection
        tried += 1
        training = seed % 3 != 0
        oracle.train(training)
        expected, of_standard = ask_standard(oracle, batch, is_weighted)
        weights, before = weights_by_id(oracle), len(wrong)
        for name, model in models.items():
            model.train(training)
            any_id = name.startswith("hashed") and batch.ids_out_of_range
            answer = train_on(model, batch.build())
            problem = judge(expected, of_standard, answer, any_id=any_id)
            if not problem and not (expected in ("anything", "same_or_refused") or any_id):
                problem = _other_weights(model, weights)
            if problem:
                wrong.append(f"seed {seed}, weighted {is_weighted}, {name}, {batch.notes}: {problem[:400]}")
        compared = expected not in ("anything", "same_or_refused") and not batch.ids_out_of_range
        if not compared or len(wrong) > before or wanted_nan(of_standard):
            oracle = standard(is_weighted)
            _restore(models, oracle)
    return tried, wrong


def wanted_nan(answer: Answer) -> bool:
    return answer.pooled is not None and bool(answer.pooled.isnan().any())


def _restore(models: dict[str, nn.Module], oracle: nn.Module) -> None:
    with torch.no_grad():
        for model in models.values():
            for name, bag in model.embedding_bags.items():
                indexes = getattr(model, "hash_indexes", {})
                rows = indexes[name].find(torch.arange(ROWS)) if name in indexes else torch.arange(ROWS)
                bag.weight.data[rows] = oracle.embedding_bags[name].weight.data


def _other_weights(model: nn.Module, expected: dict[str, torch.Tensor]) -> str:
    for name, weight in weights_by_id(model).items():
        if not torch.allclose(weight, expected[name], rtol=1e-4, atol=1e-4, equal_nan=True):
            return f"weights of {name} differ afterwards by {(weight - expected[name]).abs().max()}"
    if getattr(model, "hash_indexes", None) and any(len(index) != ROWS for index in model.hash_indexes.values()):
        return "ids were inserted or lost"
    return ""
