"""``tensors.json``: what is written is read back, and what the data files cannot hold is refused."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

from recfx.checkpoint.tensor_index import SavedChunk, SavedTensor, from_json, to_json

FILES = {"a.distcp": 1000, "b.distcp": 200}
TENSORS = {
    "scalar": SavedTensor(torch.int64, (), (SavedChunk((), (), "a.distcp", 0),)),
    "empty": SavedTensor(torch.float32, (0, 4), (SavedChunk((0, 0), (0, 4), "a.distcp", 8),)),
    "none": SavedTensor(torch.float32, (3, 0), ()),
    "one": SavedTensor(torch.float16, (2, 3, 4), (SavedChunk((0, 0, 0), (2, 3, 4), "a.distcp", 8),)),
    "rows": SavedTensor(
        torch.float32, (5,), (SavedChunk((0,), (2,), "a.distcp", 100), SavedChunk((2,), (3,), "b.distcp", 0))
    ),
    "blocks": SavedTensor(  # two blocks of columns, each cut into rows elsewhere
        torch.float32,
        (3, 5),
        (
            SavedChunk((1, 0), (2, 2), "a.distcp", 200),
            SavedChunk((0, 0), (1, 2), "a.distcp", 300),
            SavedChunk((0, 2), (2, 3), "b.distcp", 40),
            SavedChunk((2, 2), (1, 3), "b.distcp", 188),  # up to the last byte
        ),
    ),
    "byte": SavedTensor(torch.uint8, (1,), (SavedChunk((0,), (1,), "a.distcp", 999),)),
    "deep": SavedTensor(torch.uint8, (1,) * 64, (SavedChunk((0,) * 64, (1,) * 64, "a.distcp", 998),)),
}


def test_what_is_written_is_read() -> None:
    assert from_json(to_json(TENSORS), FILES) == TENSORS


def read(entry: Any, more: dict[str, Any] | None = None) -> None:
    index = {"byteorder": sys.byteorder, "tensors": {"x": entry, **(more or {})}}
    from_json(json.dumps(index).encode(), FILES)


def described(size: Any, *chunks: Any, dtype: Any = "float32") -> dict[str, Any]:
    return {"dtype": dtype, "size": size, "chunks": list(chunks)}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (described([2], [[0], [2], "a.distcp", 0], dtype="quint8"), "tensor 'x' has a wrong dtype or size"),
        (described([2, "3"]), "tensor 'x' has a wrong dtype or size"),
        (described([True]), "tensor 'x' has a wrong dtype or size"),
        (described([-1]), "tensor 'x' has a wrong dtype or size"),
        (described([1] * 65, [[0] * 65, [1] * 65, "a.distcp", 0]), "tensor 'x' has a wrong dtype or size"),
        (described([0, 2**61]), "tensor 'x' has a wrong dtype or size"),  # 2**63 bytes, if a row were added
        (described([0, 2**62 + 1], dtype="uint8"), "tensor 'x' has a wrong dtype or size"),
        (described([2], "abcd"), "a part of tensor 'x' is described wrongly"),
        (described([2], [[0], [2], "a.distcp"]), "a part of tensor 'x' is described wrongly"),
        (described([2], [[0], [2], "a.distcp", 0, 0]), "a part of tensor 'x' is described wrongly"),
        (described([2], [[0, 0], [2], "a.distcp", 0]), "a part of tensor 'x' is described wrongly"),
        (described([2], [[0], [2, 1], "a.distcp", 0]), "a part of tensor 'x' is described wrongly"),
        (described([2], [[0, 0], [2, 1], "a.distcp", 0]), "a part of tensor 'x' is described wrongly"),
        (described([2], [[-1], [2], "a.distcp", 0]), "a part of tensor 'x' is described wrongly"),
        (described([2], [[0], [-2], "a.distcp", 0]), "a part of tensor 'x' is described wrongly"),
        (described([2], [[0], [2], "a.distcp", -1]), "a part of tensor 'x' is described wrongly"),
        (described([2], [[0], [2], "a.distcp", 1.0]), "a part of tensor 'x' is described wrongly"),
        (described([2], [[1], [2], "a.distcp", 0]), "a part of tensor 'x' is outside of it"),
        (described([2, 2], [[0, 1], [2, 2], "a.distcp", 0]), "a part of tensor 'x' is outside of it"),
        (described([2], [[0], [2], "c.distcp", 0]), "is in 'c.distcp', which is not a file of the checkpoint"),
        (described([2], [[0], [2], 3, 0]), "is in 3, which is not a file of the checkpoint"),
        (described([2], [[0], [2], "b.distcp", 193]), "a part of tensor 'x' is beyond the end of b.distcp"),
        (described([51], [[0], [51], "b.distcp", 0]), "a part of tensor 'x' is beyond the end of b.distcp"),
        (described([2]), "the parts of tensor 'x' do not make it up"),
        (described([2], [[0], [1], "a.distcp", 0]), "the parts of tensor 'x' do not make it up"),
        (described([], dtype="int8"), "the parts of tensor 'x' do not make it up"),
        (
            described([3], [[0], [2], "a.distcp", 0], [[1], [1], "a.distcp", 8]),
            "the parts of tensor 'x' do not make it up",
        ),
        (
            described([2, 2], [[0, 0], [2, 1], "a.distcp", 0], [[0, 0], [1, 2], "a.distcp", 100]),
            "the parts of tensor 'x' do not make it up",
        ),
        (
            described([4, 4], [[0, 0], [4, 2], "a.distcp", 0], [[0, 1], [4, 2], "a.distcp", 100]),
            "the parts of tensor 'x' do not make it up",
        ),
        (
            described([2, 2], [[0, 0], [2, 1], "a.distcp", 0], [[0, 0], [2, 1], "a.distcp", 100]),
            "the parts of tensor 'x' do not make it up",
        ),
        (
            described([2, 2, 2], [[0, 0, 0], [1, 2, 2], "a.distcp", 0], [[1, 0, 0], [1, 2, 2], "a.distcp", 100]),
            "the parts of tensor 'x' do not make it up",
        ),
        ([], "it has no 'dtype' of type str"),
        ({"dtype": "int8", "chunks": []}, "it has no 'size' of type list"),
        ({"dtype": "int8", "size": []}, "it has no 'chunks' of type list"),
    ],
)
def test_a_tensor_that_cannot_be(entry: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(entry)
    assert message in str(caught.value)


def test_two_tensors_of_the_same_bytes() -> None:
    first, beside = [[0], [2], "a.distcp", 8], [[0], [2], "a.distcp", 16]
    read(described([2], first), {"y": described([2], beside), "z": described([2], [[0], [2], "b.distcp", 8])})
    read(described([2], first), {"y": described([0], [[0], [0], "a.distcp", 12])})
    for begin in (1, 8, 15):
        with pytest.raises(ValueError, match=r"two tensors are at the same place in a\.distcp"):
            read(described([2], [[0], [2], "a.distcp", begin]), {"y": described([2], first)})


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([], "it has no 'tensors' of type dict"),
        ({"tensors": []}, "it has no 'tensors' of type dict"),
        ({"tensors": {}}, "it has no 'byteorder' of type str"),
        ({"tensors": {}, "byteorder": "middle"}, "it was saved on a machine with byte order 'middle', this one is"),
    ],
)
def test_what_is_no_index(index: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        from_json(json.dumps(index).encode(), FILES)
    assert message in str(caught.value)


def test_brackets_without_end() -> None:
    with pytest.raises(ValueError, match="it is nested too deeply"):
        from_json(b"[" * 100_000, FILES)
