"""The identity of a saved index, which tells the indexes of different tables apart."""

import torch
from torch import Tensor

from recfx.errors import CheckpointError
from recfx.hashing.config import ResolvedHashConfig
from recfx.kernels.index.index_buffers import IndexPolicy
from recfx.kernels.step.row_initialization import initialization_key

IDENTITY = "identity"
_ROUNDING = 1e-5  # relative; digests of two tables are never so near


def identity(config: ResolvedHashConfig | IndexPolicy, name: str) -> Tensor:
    """The identity of an index: int64 ``[4]``, a digest of the table's name, the seed, ``dense_rows`` and the number of
    buckets, which alone may change from save to load.
    """
    numbers = [initialization_key(name, 0), config.seed, config.dense_rows, config.buckets]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def check_identity(config: ResolvedHashConfig | IndexPolicy, name: str, saved: object) -> None:
    """Check that a saved ``identity`` is this table's; None stands for a state without one, which passes.

    Raises:
        CheckpointError: ``torn_state``, ``averaged_index``, ``wrong_table``, ``wrong_seed``, ``dense_rows_mismatch``.
    """
    if saved is None:
        return
    if not isinstance(saved, Tensor) or saved.is_meta or saved.shape not in ((3,), (4,)):
        raise torn(f"{IDENTITY} must be torch.int64 [4] with data.", name)
    _refuse_averaged(config, name, saved)
    own_name, own_seed, own_dense, _ = identity(config, name).tolist()
    saved_name, saved_seed, saved_dense, *_ = saved.tolist()  # the first identities had no number of buckets
    if saved_name != own_name:
        raise CheckpointError(
            f"The saved index is not that of table {name!r}.",
            reason="wrong_table",
            module_path=name,
            what_to_do=f"Load the table's own state. If it was only renamed, leave {IDENTITY} out of the state.",
        )
    for setting, reason, of_saved, own in (
        ("seed", "wrong_seed", saved_seed, own_seed),
        ("dense_rows", "dense_rows_mismatch", saved_dense, own_dense),
    ):
        if of_saved != own:
            raise CheckpointError(
                f"The index was saved with {setting}={of_saved}, this one has {setting}={own}.",
                reason=reason,
                module_path=name,
                what_to_do=f"Build the table with HashConfig({setting}={of_saved}).",
            )


def _refuse_averaged(config: ResolvedHashConfig | IndexPolicy, name: str, saved: Tensor) -> None:
    """Refuse an identity that was computed with: averages of integers are floats, or equal except for rounding."""
    saved, own = saved[:3], identity(config, name)[:3]
    difference = (saved.detach().double().cpu() - own).abs()
    is_near = bool((difference <= own.abs() * _ROUNDING).all())
    if saved.is_floating_point() or (is_near and not torch.equal(saved.cpu(), own)):
        raise CheckpointError(
            "The state of the index was averaged with other states, like the weights; but ids are no numbers.",
            reason="averaged_index",
            module_path=name,
            what_to_do="average only the floating-point tensors of a state, and copy the others.",
        )
    if saved.dtype != torch.int64:
        raise torn(f"{IDENTITY} must be torch.int64 [4] with data.", name)


def torn(message: str, name: str) -> CheckpointError:
    """A ``torn_state`` error: something is missing, does not fit the rest, or is impossible."""
    return CheckpointError(
        message, reason="torn_state", module_path=name, what_to_do="The saved state is damaged: use another one."
    )
