"""Triton's interpreter in less than half of its time: what it does again and again, or for nothing, is left out.

No answer changes: types are found by name and shapes are kept, instead of being made for every operation, and what is
left out has no effect.
"""

import dataclasses
import math
from functools import cache
from typing import Any


def make_faster() -> None:
    """Replace parts of the interpreter, in the process that calls this."""
    _replace_operators_once_per_launch()
    _call_operators_at_once()
    _check_no_overflow_for_nothing()
    _remember_types()
    _remember_shapes()


def _replace_operators_once_per_launch() -> None:
    """They are replaced when a launch begins, and again at each call of a function in it, where they have been."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patch_if_needed(function: Any) -> Any:
        modules = [module for module in function.__globals__.values() if module is tl or module is tl.core]
        is_needed = any(tl.core.is_builtin(module.load) for module in modules)
        return patch(function) if is_needed else interpreter._LangPatchScope()

    interpreter._patch_lang = patch_if_needed


def _call_operators_at_once() -> None:
    """Not through a function that filters their arguments, and one that asks whether a kernel calls them."""
    from triton.runtime import interpreter

    def replace(owner: Any, name: str, operator: Any, builder: Any, scope: Any) -> None:
        semantic, function = interpreter.interpreter_semantic, getattr(operator, "__wrapped__", operator)

        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*arguments, **named)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = replace


def _check_no_overflow_for_nothing() -> None:
    """Sums and products are computed again in 64 bits, and the interpreter looks at these when it debugs, only."""
    from triton.runtime.interpreter import interpreter_builder

    options = interpreter_builder.options
    interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=options.debug)


def _remember_types() -> None:
    """numpy's type of each of Triton's, and the type of a block of other elements."""
    import triton.language as tl
    from triton.runtime import interpreter

    of_type, with_element_type = interpreter._get_np_dtype, tl.block_type.with_element_ty
    known: dict[str, Any] = {}
    blocks: dict[tuple[str, Any], Any] = {}

    def numpy_type(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = of_type(dtype)
        return known[dtype.name]

    def block(self: Any, element: Any) -> Any:
        place = (element.name, self.shape)
        if place not in blocks:
            blocks[place] = with_element_type(self, element)
        return blocks[place]

    interpreter._get_np_dtype = numpy_type
    tl.block_type.with_element_ty = block


def _remember_shapes() -> None:
    """Compute the shape of each tensor that an operation makes once, and broadcast no operands that have one shape."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic

    broadcast = TritonSemantic.broadcast_impl_value

    @cache
    def of_shape(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(extent) for extent in shape])

    def make(self: Any, handle: Any, dtype: Any) -> None:
        self.handle, self.type, self.dtype = handle, dtype, dtype.scalar
        self.numel, self.shape = of_shape(dtype.shape if dtype.is_block() else ())

    def broadcast_if_needed(self: Any, left: Any, right: Any) -> Any:
        one, other = left.type, right.type
        is_done = one.is_block() and other.is_block() and one.shape == other.shape
        return (left, right) if is_done else broadcast(self, left, right)

    tl.tensor.__init__ = make
    TritonSemantic.broadcast_impl_value = broadcast_if_needed
