"""Nodes as operators of torch, by which torch.compile has them in its graphs.

An operator takes the tensors of a batch, the weights of the tables, and the name of a call in a graph: the method of
its node that has the operator's name runs. Checks, kernels, counts and optimizers are thus those of uncompiled code.
Autograd's part is the formula of ``look_up``: gradients of weights and of the weights of ids. Tables with an optimizer
in backward are stepped as always, when the backward pass has reached all lookups that read them (``step_once.py``): the
operator's backward leaves its part, and returns the gradient of the lookup's leaf, so that it is not taken for dead
code. No table changes while a compiled graph runs, so its operators may be in any order.
"""

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from recfx.lowering.step.trained_batch import reached
from recfx.versions.differences import OUTSIDE_CUDA_GRAPHS

_NODES: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_next = itertools.count()


def constant(function: Any) -> Any:
    """Decorator: torch.compile calls the function while it traces, and keeps what it returns."""
    function._dynamo_marked_constant = True  # as ``assume_constant_result``, which takes long to import
    return function


@constant
def new_call(node: Any) -> str:
    """The name of a call of ``node`` in a graph. Each has its own number, or two with one batch would become one; and
    what sizes follow from, because torch finds compiled graphs of other processes by what stands in a graph.
    """
    call = f"{next(_next)} {getattr(node, 'table_of_feature', '')}"
    _NODES[call] = node
    return call


def _operator(schema: str, **options: Any) -> Any:
    name, parenthesis, rest = schema.partition("(")

    def run(*arguments: Any) -> Any:
        found = getattr(_NODES[arguments[-1]], name)(*arguments[:-1])
        several = [one.untyped_storage().data_ptr() for one in found if one.numel()] if isinstance(found, list) else []
        return found if len(set(several)) == len(several) else [one.clone() for one in found]  # they may not be views

    return torch.library.custom_op(f"recfx::{name}", run, mutates_args=(), schema=parenthesis + rest, **options)


check_batch = _operator(
    "check_batch(Tensor ids, Tensor? scale, Tensor bags, bool are_offsets, str[] keys, SymInt batch_size, bool trains, "
    "str call) -> Tensor",
    **OUTSIDE_CUDA_GRAPHS,
)
find_ids = _operator(
    "find_ids(Tensor ids, Tensor offsets, SymInt batch_size, str call) -> Tensor", **OUTSIDE_CUDA_GRAPHS
)
look_up = _operator(
    "look_up(Tensor ids, Tensor offsets, Tensor? scale, SymInt[] lengths, SymInt batch_size, Tensor[] weights, "
    "Tensor[] leaves, str call) -> Tensor[]"
)
look_up_backward = _operator(
    "look_up_backward(Tensor ids, Tensor offsets, Tensor? scale, SymInt[] lengths, Tensor?[] gradients, bool[] needed, "
    "bool steps, Tensor[] read, str call) -> Tensor[]",
    **OUTSIDE_CUDA_GRAPHS,
)


@check_batch.register_fake
def _(ids: Tensor, scale: Tensor | None, bags: Tensor, are_offsets: bool, *rest: object) -> Tensor:
    return bags.new_empty(bags.numel() + 1 - int(are_offsets), dtype=torch.int64)


@find_ids.register_fake
def _(ids: Tensor, *rest: object) -> Tensor:
    return ids.new_empty(ids.shape, dtype=torch.int64)


@look_up.register_fake
def _(ids: Tensor, offsets: Tensor, scale: Tensor | None, lengths: list[int], batch_size: int, *rest: Any) -> Any:
    weights, node = rest[0], _NODES[rest[-1]]
    dims = [weights[table].shape[1] for table in node.table_of_feature]
    shapes = list(zip(lengths, dims, strict=True)) if node.unpooled else [(batch_size, sum(dims))]
    return [weights[0].new_empty(shape, dtype=torch.float32) for shape in shapes]


@look_up_backward.register_fake
def _(ids: Tensor, *rest: Any) -> list[Tensor]:
    needed, steps, read, node = *rest[-4:-1], _NODES[rest[-1]]
    like = node.leaves if steps else list(itertools.compress(node.weights_now(), needed))
    of_scale = [ids.new_empty(ids.shape, dtype=torch.float32)] if read else []
    return of_scale + [ids.new_empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in like]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ids, offsets, scale, ctx.lengths, _, weights, leaves, ctx.call = inputs
    ctx.needed, ctx.leaves = [weight.requires_grad for weight in weights], len(leaves)
    # The backward reads the weights again for a gradient of the weights of ids alone.
    read = weights if scale is not None and scale.requires_grad else []
    ctx.save_for_backward(ids, offsets, scale, *read)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    ids, offsets, scale, *read = ctx.saved_tensors
    of_scale, of_weights, of_leaves = None, [None] * len(ctx.needed), [None] * ctx.leaves
    if any(gradient is not None for gradient in gradients):
        are_reached = reached(_NODES[ctx.call].table_of_feature, tuple(gradients), len(ctx.needed))
        needed = [asked and is_reached for asked, is_reached in zip(ctx.needed, are_reached, strict=True)]
        how = needed, ctx.leaves > 0, read, ctx.call
        found = iter(look_up_backward(ids, offsets, scale, ctx.lengths, gradients, *how))
        of_scale = next(found).to(scale.dtype) if read else None
        of_leaves = [next(found) for _ in of_leaves]
        of_weights = [next(found) if is_needed and not ctx.leaves else None for is_needed in needed]
    of_lengths: list[None] | None = None if ctx.lengths else []  # torch takes an empty list for one of tensors
    return None, None, of_scale, of_lengths, None, of_weights, of_leaves, None


look_up.register_autograd(_differentiate, setup_context=_keep)
