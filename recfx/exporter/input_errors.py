"""What is said of inputs that a loaded file does not take."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from recfx.errors import InputError, did_you_mean, type_of

_TOLD = re.compile(r"(builtins\.)?(RuntimeError: )?(?P<message>.*?) *\[(?P<reason>[a-z_]+)\]")
"""The last line of an error that a file's own check raises."""

_LACKS = re.compile(r"(?P<before>.*the batch lacks feature (?P<name>.*?))(?P<after>; it has \[(?P<keys>.*)\])")

_MOST_NAMES = 3

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


def check_inputs(passed: object, taken: Sequence[str]) -> None:
    """Refuse inputs by name that are not those that a file takes, or no tensors.

    Raises:
        InputError: ``wrong_argument``, ``unknown_input``, ``missing_input``.
    """
    if not isinstance(passed, Mapping):
        raise InputError(f"the inputs are {type_of(passed)}, not a dict.", reason="wrong_argument", what_to_do=_A_DICT)
    unknown = [name for name in passed if name not in taken]
    missing = [name for name in taken if name not in passed]
    meant: dict[str, str] = {}
    left = list(missing)
    for name in unknown:
        for nearest in difflib.get_close_matches(str(name), left, 1, 0.8):
            meant[name] = nearest
            left.remove(nearest)
    named = [str(name) + (did_you_mean(name, [meant[name]]) if name in meant else "") for name in unknown]
    wrong = [f"there {_are(unknown)} no {_inputs(named)}"] if unknown else []
    wrong += [f"{_inputs(left)} {_are(left)} missing"] if left else []
    if wrong:
        raise InputError(
            f"{', and '.join(wrong)}.",
            reason="unknown_input" if unknown else "missing_input",
            what_to_do=_A_DICT,
        )
    for name, value in passed.items():
        with_values(value, f"input {name}")


SECOND_FILE = (
    "a file serves its sample's arguments alone: for calls without one, export a second file from such a sample."
)
"""Advice where an argument is missing, or one too many."""

_A_DICT = f"pass a dict with a tensor for each name in LoadedModel.inputs; {SECOND_FILE}"


def with_values(value: object, where: str) -> torch.Tensor:
    """The tensor; refuses something else (``wrong_argument``), and a tensor on meta."""
    if isinstance(value, torch.Tensor) and not value.is_meta:
        return value
    what, what_to_do = (
        f"{type_of(value)}, not a tensor",
        ("pass a tensor of the sample's dtype and dimensions: torch.as_tensor makes one of a list or an array."),
    )
    if value is None:
        what_to_do = "pass a tensor; for a feature without ids, an empty one, and lengths of 0."
    elif isinstance(value, torch.Tensor):
        what, what_to_do = "on device 'meta', which holds no values", "pass a tensor on a device that computes."
    raise InputError(f"{where} is {what}.", reason="wrong_argument", what_to_do=what_to_do)


@contextmanager
def input_errors(unlike_sample: Callable[[], tuple[str, str] | None]) -> Iterator[None]:
    """Raise errors of the file's own checks as recfx's: those whose message ends with a reason code.

    Args:
        unlike_sample: what to blame, with a reason code, for an error of the model itself; None if that is not known.
    """
    try:
        yield
    except (torch.jit.Error, RuntimeError) as error:
        match = _TOLD.fullmatch(_last_line(error))
        told = unlike_sample() if match is None else (_with_nearest(match["message"]), match["reason"])
        if told is None:
            raise
        message, reason = told
        raise InputError(
            f"{message}.",
            reason=reason,
            what_to_do=_WHAT_TO_DO.get(reason, "pass a batch like the sample of the export."),
        ) from error


def _with_nearest(message: str) -> str:
    """The message of a file that lacks a feature, with the key of the batch that may have been meant."""
    lacks = _LACKS.fullmatch(message)
    if lacks is None:
        return message
    keys = [key.strip("'") for key in lacks["keys"].split(", ")]
    return f"{lacks['before']}{did_you_mean(lacks['name'], keys, by=True)}{lacks['after']}"


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _inputs(names: Sequence[str]) -> str:
    """``input a``, ``inputs a and b``, ``inputs a, b, c and 11 more``."""
    shown = list(names[:_MOST_NAMES])
    rest = len(names) - len(shown)
    *most, last = [*shown, f"{rest:,} more"] if rest else shown
    return ("inputs " if most else "input ") + ", ".join(most) + (" and " if most else "") + last


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
