"""Hooks of TorchRec's sharded modules that its tools register, and that the graph of a sharded collection never calls.

Such a tool would record nothing without an error: the hooks are refused by name.
"""

from __future__ import annotations

from typing import Any

from recfx.errors import ConversionError


def hook_refused(what: str, path: str) -> ConversionError:
    """The error for a tool that waits for what a sharded collection does not call.

    Args:
        what: the tool, as the beginning of a sentence.
        path: fully qualified name of the collection.
    """
    return ConversionError(
        f"{what} would be told of no lookup: a sharded collection of recfx runs a graph of its own kernels, without "
        "TorchRec's lookup modules and their hooks.",
        reason="torchrec_hook_not_called",
        module_path=path,
        what_to_do="leave the collections that it is for unconverted, so that TorchRec shards them; or compare "
        "state_dict() before and after, where fused tables move only the rows that batches use.",
    )


class RefusedHooks:
    """The hooks by which TorchRec's trackers learn of lookups; base of ``ShardedCollection``."""

    collection: str

    def register_post_lookup_tracker_fn(self, record_fn: Any) -> None:
        """Raises a ``ConversionError``, ``torchrec_hook_not_called``."""
        raise hook_refused("register_post_lookup_tracker_fn: a tracker", self.collection)

    def register_post_odist_tracker_fn(self, record_fn: Any) -> None:
        """Raises a ``ConversionError``, ``torchrec_hook_not_called``."""
        raise hook_refused("register_post_odist_tracker_fn: a tracker", self.collection)

    @property
    def post_lookup_tracker_fn(self) -> None:
        """None. Setting anything else raises a ``ConversionError``, ``torchrec_hook_not_called``."""
        return None

    @post_lookup_tracker_fn.setter
    def post_lookup_tracker_fn(self, record_fn: Any) -> None:
        if record_fn is not None:
            self.register_post_lookup_tracker_fn(record_fn)

    @property
    def post_odist_tracker_fn(self) -> None:
        """None. Setting anything else raises a ``ConversionError``, ``torchrec_hook_not_called``."""
        return None

    @post_odist_tracker_fn.setter
    def post_odist_tracker_fn(self, record_fn: Any) -> None:
        if record_fn is not None:
            self.register_post_odist_tracker_fn(record_fn)
