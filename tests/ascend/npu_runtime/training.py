"""The same training on a device of the caller's choice; what it leaves is compared on the CPU."""

from typing import Any

import torch
from torchrec import KeyedJaggedTensor

import recfx
from tests.checkpoint.training import Training

DEVICE = "npu:0"
FEATURES = ("a", "b", "c")  # of TwoPart: tables a and b are summed, c is averaged
SAMPLES = 6
RAW_IDS = (2**40, -5)  # id = factor * number + shift


def make_batch(number: int, distinct: int, raw: bool) -> KeyedJaggedTensor:
    """Bags of up to three ids, some empty: the same ``number`` always gives the same batch."""
    draw = torch.Generator().manual_seed(number)
    lengths = torch.randint(0, 4, (len(FEATURES) * SAMPLES,), generator=draw)
    ids = torch.randint(0, distinct, (int(lengths.sum()),), generator=draw)
    factor, shift = RAW_IDS if raw else (1, 0)
    return KeyedJaggedTensor(list(FEATURES), factor * ids + shift, lengths=lengths)


def step(training: Training, features: KeyedJaggedTensor) -> torch.Tensor:
    """One training step; its output, on the CPU."""
    training.model.train()
    training.optimizer.zero_grad()
    output = training.model(features)
    (output - 1).square().mean().backward()
    training.optimizer.step()
    return output.detach().cpu()


@torch.no_grad()
def evaluate(training: Training, features: KeyedJaggedTensor) -> torch.Tensor:
    """One forward in eval mode; its output, on the CPU."""
    training.model.eval()
    return training.model(features).cpu()


def train(
    device: str,
    optimizer: str,
    hashing: recfx.HashConfig | None,
    *,
    rows: int,
    distinct: int,
    ids_on: str = "",
    steps: int = 6,
) -> dict[str, Any]:
    """Train on ``device``, with an eval forward in between; outputs and everything that is kept from step to step.

    Args:
        device: where the model is.
        optimizer: of the tables: one of ``tests.checkpoint.training.KINDS``.
        hashing: as for ``recfx.convert``.
        rows: of every table.
        distinct: how many different ids there are. Above ``rows``, a table that evicts has to.
        ids_on: where the batches are; ``""``: on ``device``.
        steps: how many.
    """
    training = Training.build(optimizer, hashing, rows)
    training.model.to(device)
    raw = hashing is not None and hashing.dense_rows == 0
    outputs = []
    for number in range(steps):
        outputs.append(step(training, make_batch(number, distinct, raw).to(torch.device(ids_on or device))))
        if number == steps // 2:
            outputs.append(evaluate(training, make_batch(99, distinct + 10 * raw, raw).to(torch.device(device))))
    return {"outputs": outputs, **state_of(training)}


def state_of(training: Training) -> dict[str, Any]:
    """Everything that is kept, on the CPU."""
    return {
        name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in training.everything().items()
    }


def assert_close(actual: dict[str, Any], expected: dict[str, Any], rtol: float, atol: float) -> None:
    """Floating-point numbers within the tolerance; all else, ids and rows among it, is equal.

    Slots are placed by a seed that each index draws for itself.
    """
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if name.endswith(("slot_groups", "side_row")):
            continue
        for item, expected_item in zip(_listed(actual[name]), _listed(value), strict=True):
            if not isinstance(expected_item, torch.Tensor):
                assert item == expected_item, name
            elif expected_item.is_floating_point():
                torch.testing.assert_close(item, expected_item, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
            else:
                assert torch.equal(item, expected_item), name


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
