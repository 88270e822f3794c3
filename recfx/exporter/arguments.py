"""The arguments of an exported program: tensors and KJTs, into which every other argument is taken apart."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from recfx.errors import ExportError, InputError, few, type_of
from recfx.exporter.patterns import Pattern, dtype_of, identifier, is_constant, is_plain, pattern_of, rebuild
from recfx.models.nests import leaves_of, nest_of
from recfx.models.sample import Sample

_OWN_ERROR = re.compile(r"(builtins\.)?(RuntimeError: )?(?P<message>.*?) *\[(?P<reason>[a-z_]+)\]")
"""The last line of an error that a file's own check raises."""

_WHAT_TO_DO = {
    "wrong_id_dtype": "convert the ids with .long(), or .int() if they fit.",
    "wrong_dtype": "convert the tensor to the dtype that it had in the sample of the export.",
    "wrong_rank": "pass as many dimensions as the sample of the export had, the batch's among them.",
    "wrong_size": "pass the sizes of the sample of the export, apart from the batch's.",
    "wrong_batch_size": "pass as many samples in each input: rows of a tensor, and lengths of each feature.",
    "bad_ids": "pass the ids of all samples one after another, and one length per sample.",
    "bad_lengths": "pass one length (int64 or int32) per feature and sample that counts its ids; they add up to "
    "the number of ids.",
    "inverse_indices": "pass each sample's ids by themselves, without inverse_indices: files do not expand bags.",
    "bad_weights": "pass one weight per id, in the order of the ids.",
    "missing_weights": "pass one weight per id: the model was exported with a batch that had weights.",
    "missing_feature": "pass a batch with all features of the sample of the export, with no ids where there are none.",
    "other_features": "pass the features of the sample of the export.",
    "id_out_of_range": "pass rows of the table; for raw ids, convert the model with recfx.HashConfig.raw_ids(), train "
    "it and export it again.",
}
"""By the code that a file's own check raises. Files of other versions may have other codes."""

SECOND_FILE = (
    "a file serves its sample's arguments alone: for calls without one, export a second file from such a sample."
)
"""Advice where an argument is missing, or one too many."""

_A_DICT = f"pass a dict with a tensor for each name in LoadedModel.inputs; {SECOND_FILE}"


def check_inputs(passed: object, taken: Sequence[str]) -> None:
    """Refuse inputs by name that are not those that a file takes, or no tensors."""
    if not isinstance(passed, Mapping):
        raise InputError(f"the inputs are {type_of(passed)}, not a dict.", reason="wrong_argument", what_to_do=_A_DICT)
    unknown = [str(name) for name in passed if name not in taken]
    missing = [name for name in taken if name not in passed]
    wrong = [f"it takes no {few(unknown, 3)}"] * bool(unknown) + [f"it lacks {few(missing, 3)}"] * bool(missing)
    if wrong:
        reason = "unknown_input" if unknown else "missing_input"
        raise InputError(f"{', and '.join(wrong)}.", reason=reason, what_to_do=_A_DICT)
    for name, value in passed.items():
        with_values(value, f"input {name}")


def with_values(value: object, where: str) -> torch.Tensor:
    """The tensor; refuses something else (``wrong_argument``), and a tensor on meta."""
    if isinstance(value, torch.Tensor) and not value.is_meta:
        return value
    what, what_to_do = f"{type_of(value)}, not a tensor", "pass a tensor of the sample's dtype and dimensions."
    if value is None:
        what_to_do = "pass a tensor; for a feature without ids, an empty one, and lengths of 0."
    elif isinstance(value, torch.Tensor):
        what, what_to_do = "on device 'meta', which holds no values", "pass a tensor on a device that computes."
    raise InputError(f"{where} is {what}.", reason="wrong_argument", what_to_do=what_to_do)


@contextmanager
def input_errors(unlike_sample: Callable[[], tuple[str, str] | None]) -> Iterator[None]:
    """Raise errors of the file's own checks as recfx's, and of others what ``unlike_sample`` blames, if it knows."""
    try:
        yield
    except (torch.jit.Error, RuntimeError) as error:
        lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
        match = _OWN_ERROR.fullmatch(lines[-1]) if lines else None
        blamed = unlike_sample() if match is None else (match["message"], match["reason"])
        if blamed is None:
            raise
        message, reason = blamed
        what_to_do = _WHAT_TO_DO.get(reason, "pass a batch like the sample of the export.")
        raise InputError(f"{message}.", reason=reason, what_to_do=what_to_do) from error


@dataclass(frozen=True)
class Signature:
    """The arguments of a model, as one sample gives them: their names, and the pattern of each.

    ``positional`` is how many of them the sample gives by position, ``order`` what can be given so (() in older files:
    all of them). ``sizes`` has those of the sample's tensors by name, -1 if they change with the batch size. Batches in
    ``exact`` must have the sample's features, in its order, and weights only as it had. ``keywords`` is what the model
    takes as ``**kwargs``, in the sample's order; () if that is less than two.
    """

    parameters: tuple[str, ...]
    patterns: tuple[Pattern, ...]
    positional: int
    order: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sizes: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    exact: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()

    def leaves(self) -> list[Pattern]:
        """The arguments of the exported program."""
        return [leaf for pattern in self.patterns for leaf in pattern.leaves()]

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments of the exported program for one call of the model."""
        values: list[Any] = []
        arguments = self._by_name(args, kwargs)
        for name, pattern in zip(self.parameters, self.patterns, strict=True):
            if name in arguments:
                self._flatten(arguments[name], pattern, name, values)
            elif pattern.kind != "constant" or (self.order and not is_constant(self.defaults.get(name), pattern.value)):
                built_in = f"{pattern.value!r} is built in" if pattern.kind == "constant" else "the sample had it"
                raise _wrong(f"argument {name} is missing; {built_in}.")
        return values

    def _flatten(self, value: Any, pattern: Pattern, where: str, values: list[Any]) -> None:
        if (attribute := _own_attribute(value)) is not None:
            raise _wrong(f"{where} has an attribute {attribute!r} of the user's, which the sample did not have.")
        if pattern.kind == "tensor":
            if value is None:
                raise _wrong(f"{where} is None, not a tensor as in the sample.")
            values.append(with_values(value, where))
        elif pattern.kind == "kjt":
            values.append(batch := _keyed_jagged(value, where))
            if pattern.name not in self.exact:
                return
            if batch.weights_or_none() is not None and not pattern.is_weighted:
                raise InputError(
                    f"{where} has weights; the sample had none.",
                    reason="bad_weights",
                    what_to_do=f"pass it without weights; {SECOND_FILE}",
                )
            if tuple(batch.keys()) != pattern.keys:
                given, taken = ", ".join(batch.keys()), ", ".join(pattern.keys)
                raise InputError(
                    f"{where} has {given}; the file takes {taken}, in this order.",
                    reason="missing_feature" if set(pattern.keys) - set(batch.keys()) else "other_features",
                    what_to_do="pass the features of the sample of the export.",
                )
        elif pattern.kind == "constant":
            if not is_constant(value, pattern.value):
                shown = repr(value) if is_plain(value) else type_of(value)
                raise _wrong(f"{where} is {shown}, but it was exported with {pattern.value!r}, which is built in.")
        else:
            _check_nest(value, pattern, where)
            if pattern.kind == "dict":  # the model may read it
                _check_order(list(value), pattern.keys, where)
            for key, item, part in pattern.children(value):
                self._flatten(part, item, f"{where}.{key}", values)

    def unlike_sample(self, leaves: Iterable[Any]) -> tuple[str, str] | None:
        """The first tensor of another dtype or rank than the sample's, in words, and a reason code; or else the first
        of other sizes, or of another batch size than the first KJT, for which the lengths of a feature will do. A model
        may take such tensors, so only a call that has failed asks. The C++ server does the same.
        """
        given = list(zip(self.leaves(), leaves, strict=True))
        kjts = ((leaf.name, value) for leaf, value in given if leaf.kind == "kjt" and leaf.keys)
        kjt, batch = next(kjts, ("", ()))
        batch_size = batch.stride() if isinstance(batch, KeyedJaggedTensor) else len(batch)
        of_other_sizes = None
        for leaf, value in given:
            if leaf.is_weighted and isinstance(value, KeyedJaggedTensor) and value.weights_or_none() is None:
                return f"{leaf.name}: the batch has no weights for its ids", "missing_weights"
            if leaf.kind != "tensor" or leaf.value is None:
                continue
            if value.dim() != leaf.value["dimensions"]:
                shown = f"must have {leaf.value['dimensions']} dimensions, but is {list(value.shape)}"
                return f"input {leaf.name} {shown}", "wrong_rank"
            expected = leaf.type_name or dtype_of(value)
            if dtype_of(value) != expected:
                return f"input {leaf.name} must be {expected}, got {dtype_of(value)}", "wrong_dtype"
            sizes = self.sizes.get(leaf.name, [])
            if any(expected not in (-1, size) for expected, size in zip(sizes, value.shape, strict=False)):
                was = ", ".join("any" if size == -1 else str(size) for size in sizes)
                message = (
                    f"the model fails with input {leaf.name} of sizes {list(value.shape)}; the sample's had [{was}]"
                )
                of_other_sizes = of_other_sizes or (message, "wrong_size")
            elif kjt and list(sizes[:1]) == [-1] and len(value) != batch_size:
                message = f"the model fails with {len(value)} samples in input {leaf.name} and {batch_size} in {kjt}"
                of_other_sizes = of_other_sizes or (message, "wrong_batch_size")
        return of_other_sizes

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call; those that the sample did not give must have their defaults."""
        order = self.order or self.parameters
        if len(args) > len(order):
            raise _wrong(f"{len(args)} arguments were passed; by position, it takes {len(order)}: {', '.join(order)}.")
        by_position = dict(zip(order, args, strict=False))
        _check_order([name for name in kwargs if name in self.keywords], self.keywords, "the call")
        twice = sorted(set(by_position) & set(kwargs))
        if twice:
            raise _wrong(f"argument {twice[0]!r} was passed by position and by name.")
        for name, value in (by_position | kwargs).items():
            if name in self.parameters:
                continue
            if name not in order and name not in self.defaults:
                sample = ", ".join(self.parameters)
                raise _wrong(f"it has no argument {name!r}; the sample had {len(self.parameters)}: {sample}.")
            if name not in self.defaults or not is_constant(value, self.defaults[name]):
                raise _wrong(f"argument {name!r} was not in the sample that the model was exported with.")
        return by_position | kwargs

    def call_of(self, leaves: Iterable[Any]) -> Sample:
        """The call of the model that these tensors and KJTs make; the inverse of ``flatten``."""
        remaining = iter(leaves)
        values = [rebuild(pattern, remaining) for pattern in self.patterns]
        keywords = zip(self.parameters[self.positional :], values[self.positional :], strict=True)
        return Sample(*values[: self.positional], **dict(keywords))


def signature_of(model: nn.Module, sample: Sample) -> Signature:
    """Take a sample call apart."""
    names, defaults, keywords = _parameters(model, sample)
    parameters = (*names[: len(sample.args)], *sample.kwargs)
    taken: set[str] = set()
    values = [*sample.args, *sample.kwargs.values()]
    for name, value in zip(parameters, values, strict=True):
        if any(isinstance(leaf, KeyedJaggedTensor) and leaf.variable_stride_per_key() for leaf in leaves_of(value)):
            raise ExportError(
                f"the features of argument {name} have batch sizes of their own, and files take one for all.",
                reason="unsupported_argument",
                what_to_do="pass a sample whose features have the same number of samples.",
            )
        for leaf in leaves_of(value):
            if (attribute := _own_attribute(leaf)) is not None:
                raise ExportError(
                    f"argument {name} holds {type_of(leaf)} with an attribute {attribute!r} of the user's.",
                    reason="unsupported_argument",
                    what_to_do="pass what it is as an argument, or a field of a dataclass.",
                )
    patterns = tuple(pattern_of(value, name, _refusal, taken) for name, value in zip(parameters, values, strict=True))
    signature = Signature(parameters, patterns, len(sample.args), names, defaults, keywords=keywords)
    return dataclasses.replace(signature, sizes=_sizes(signature, sample))


def _sizes(signature: Signature, sample: Sample) -> dict[str, list[int]]:
    bigger = sample.resized()
    if bigger is None:
        return {}
    of_both = zip(*(signature.flatten(call.args, call.kwargs) for call in (sample, bigger)), strict=True)
    return {
        leaf.name: [
            size if size == other else -1 for size, other in zip(*(tensor.shape for tensor in both), strict=True)
        ]
        for leaf, both in zip(signature.leaves(), of_both, strict=True)
        if leaf.kind == "tensor"
    }


def _parameters(model: nn.Module, sample: Sample) -> tuple[tuple[str, ...], dict[str, Any], tuple[str, ...]]:
    """The names of what a model takes by position, all defaults that are constants, and the names in ``**kwargs``."""
    forward = model.__dict__.get("forward") or type(model).forward.__get__(model)
    parameters = inspect.signature(forward).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items() if is_plain(parameter.default)}
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, parameter in parameters.items() if parameter.kind in by_position]
    for number in range(len(names), len(sample.args)):
        names.append(identifier(f"argument_{number}", {*names, *defaults, *sample.kwargs}))
    keywords = tuple(name for name in sample.kwargs if name not in parameters)
    return tuple(names), defaults, keywords if len(keywords) > 1 else ()


def _refusal(name: str, value: Any) -> ExportError:
    return ExportError(
        f"argument {name} holds {type_of(value)}.",
        reason="unsupported_argument",
        what_to_do="pass tensors, KeyedJaggedTensors, or dicts, lists and dataclasses of these.",
    )


def _own_attribute(leaf: Any) -> str | None:
    """The name of an attribute that the user has set on a tensor or a batch: copies do not have it, nor do files."""
    is_leaf = isinstance(leaf, (torch.Tensor, KeyedJaggedTensor))
    return next((name for name in vars(leaf) if not name.startswith("_")), None) if is_leaf else None


def _check_order(names: Sequence[str], expected: tuple[str, ...], where: str) -> None:
    if tuple(names) != expected:
        shown, of_sample = ", ".join(names), ", ".join(expected)
        raise _wrong(
            f"{where} has {shown} in this order, which the model may read; the sample had {of_sample}.",
            "pass them in the order that they had in the sample of the export.",
        )


def _check_nest(value: Any, pattern: Pattern, where: str) -> None:
    if pattern.kind == "dict":
        if not isinstance(value, dict) or set(value) != set(pattern.keys):
            raise _wrong(f"{where} must be a dict of {', '.join(pattern.keys)}.")
    elif pattern.kind == "dataclass":
        missing = [key for key in pattern.keys if not hasattr(value, key)]
        if missing:
            raise _wrong(f"{where} is {type_of(value)} without {missing[0]}; a {pattern.type_name} has it.")
        nest = nest_of(value)
        others = [key for key in (() if nest is None else nest.items) if key not in pattern.keys]
        if others:
            raise _wrong(f"{where} has {others[0]}, which the sample had not.")
    elif not isinstance(value, (list, tuple)) or hasattr(value, "_fields") or len(value) != len(pattern.items):
        raise _wrong(f"{where} must be a {pattern.kind} of {len(pattern.items)} items.")
    # The model may ask for the class, and a class may answer otherwise: the file answers as for the sample's.
    if pattern.type_name not in ("", type(value).__name__):
        raise _wrong(f"{where} is {type_of(value)}; in the sample it was a {pattern.type_name}.")


def _keyed_jagged(value: Any, where: str) -> KeyedJaggedTensor:
    if isinstance(value, KeyedJaggedTensor):
        for name in ("values", "lengths", "offsets", "weights"):  # neither TorchRec nor TorchScript looks
            part = value.__dict__.get(f"_{name}")
            if part is not None or name == "values":
                with_values(part, f"{where}.{name}")
        subclasses = type(value).__mro__[: type(value).__mro__.index(KeyedJaggedTensor)]
        names = (name for cls in subclasses for name in vars(cls) if not name.startswith("_"))
        if own := [name for name in names if hasattr(KeyedJaggedTensor, name)]:
            raise _wrong(f"{where} is {type_of(value)}, whose own {own[0]} a file does not have.")
        return _without_caches(value)
    if isinstance(value, TensorDict):
        return maybe_td_to_kjt(value, None)
    raise _wrong(f"{where} is {type_of(value)}, not a KeyedJaggedTensor.")


def _without_caches(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The batch, whose stride and lengths per key follow from its lengths, whatever it was made with."""
    if batch.variable_stride_per_key() or batch.inverse_indices_or_none() is not None or not batch.keys():
        return batch  # a file refuses the first two
    return KeyedJaggedTensor(
        batch.keys(),
        batch.values(),
        batch.weights_or_none(),
        lengths=batch.lengths_or_none(),
        offsets=batch.offsets_or_none(),
    )


def _wrong(
    message: str, what_to_do: str = f"pass arguments like those of the sample of the export; {SECOND_FILE}"
) -> InputError:
    return InputError(message, reason="wrong_argument", what_to_do=what_to_do)
