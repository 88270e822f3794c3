"""The names by which the rules for operators are found."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

FUNCTIONS: dict[Any, str] = {
    operator.mod: "remainder",
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.floordiv: "floor_divide",
    operator.and_: "bitwise_and",
    operator.getitem: "getitem",
    getattr: "getattr",
    nn.functional.embedding: "embedding",
    KeyedJaggedTensor: "KeyedJaggedTensor",
    JaggedTensor: "JaggedTensor",
    torch.concat: "cat",
    torch.clip: "clamp",
    **{
        getattr(torch, name): name
        for name in (
            "remainder", "fmod", "clamp", "clamp_min", "clamp_max", "add", "sub", "mul", "floor_divide", "bitwise_and",
            "abs", "cat", "stack", "where", "minimum", "maximum", "bucketize", "searchsorted", "flatten", "reshape",
            "squeeze", "unsqueeze",
        )
    },
}  # fmt: skip


def name_of(node: fx.Node) -> str:
    """The name of the rule for a call, if there is one."""
    return str(node.target) if node.op == "call_method" else FUNCTIONS.get(node.target, "")
