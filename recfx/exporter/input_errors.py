"""What is said of inputs that a loaded file does not take."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from recfx.errors import InputError, few, type_of

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
    """Raise errors of the file's own checks as recfx's: those whose message ends with a reason code.

    Args:
        unlike_sample: what to blame, with a reason code, for an error of the model itself; None if that is not known.
    """
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
