"""Inverse indices: for each sample of the full batch, which of its own bags a feature reads."""

from __future__ import annotations

from typing import NoReturn

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.errors import InputError


class InverseIndices:
    """The checks of one collection's inverse indices.

    Args:
        collection: fully qualified name of the collection, for messages.
        feature_names: its features, table by table.
    """

    def __init__(self, collection: str, feature_names: list[str]) -> None:
        self.collection = collection
        # As in the standard collection, "feature@table" is a name for the feature.
        self._names = [name.split("@")[0] for name in feature_names]

    def of_features(
        self, named: tuple[list[str], torch.Tensor] | None, batch_sizes: list[int], features: KeyedJaggedTensor
    ) -> torch.Tensor:
        """The checked inverse indices of the collection's features.

        Args:
            named: names and ``[names, B]`` indices, as in ``KeyedJaggedTensor``. If it is None or has no indices, every
                feature's bags are the full batch.
            batch_sizes: the batch sizes of the features.
            features: the batch, whose device the result is on.

        Returns:
            int64 ``[F, B]``, each within the feature's own batch.

        Raises:
            InputError: ``bad_inverse_indices``; ``variable_batch_without_inverse_indices`` if features have different
                batch sizes; ``several_devices``.
        """
        device = features.values().device
        inverse = None if named is None else self._select(named)
        if inverse is None or inverse.numel() == 0:
            if len(set(batch_sizes)) > 1:
                self._refuse(
                    "features have different batch sizes, but there are no inverse indices to bring them together.",
                    "variable_batch_without_inverse_indices",
                    "pass inverse_indices= to the KeyedJaggedTensor, or one batch size for all features.",
                )
            return torch.arange(batch_sizes[0], device=device).expand(len(batch_sizes), -1)
        if device.type == "meta":
            return inverse.to(device)
        if inverse.is_meta:
            self._refuse(
                f"inverse_indices are on device meta, but ids on {device}.",
                "several_devices",
                "move the whole KeyedJaggedTensor to one device.",
            )
        limits = torch.tensor(batch_sizes, device=inverse.device).unsqueeze(1)
        wrong = torch.nonzero((inverse < 0) | (inverse >= limits))
        if wrong.numel():
            feature, sample = wrong[0].tolist()
            self._refuse(
                f"the inverse index {int(inverse[feature, sample])} of feature {self._names[feature]!r} is outside its "
                f"{batch_sizes[feature]} bags.",
                "bad_inverse_indices",
                _WHAT_TO_DO,
            )
        return inverse.to(device)

    def _select(self, named: tuple[list[str], torch.Tensor]) -> torch.Tensor:
        names, indices = named
        position_of = {name: position for position, name in enumerate(names)}
        missing = [name for name in self._names if name not in position_of]
        if missing:
            self._refuse(f"there are none for feature {missing[0]!r}, only for {list(names)}.")
        if (
            not isinstance(indices, torch.Tensor)
            or indices.layout != torch.strided
            or indices.dim() != 2
            or (indices.dtype not in (torch.int64, torch.int32) and indices.numel() > 0)
        ):
            form = f"{indices.dtype} {list(indices.shape)}" if isinstance(indices, torch.Tensor) else type(indices)
            self._refuse(f"they are {form}, but must be int64 or int32 [features, batch size].")
        rows = [position_of[name] for name in self._names]
        if max(rows) >= indices.shape[0]:
            self._refuse(f"there are {len(names)} names, but indices for {indices.shape[0]} features.")
        return indices.index_select(0, torch.tensor(rows, device=indices.device)).to(torch.int64)

    def _refuse(self, message: str, reason: str = "bad_inverse_indices", what_to_do: str = "") -> NoReturn:
        if reason == "bad_inverse_indices" and not what_to_do:
            message, what_to_do = f"inverse_indices do not fit the collection: {message}", _WHAT_TO_DO
        raise InputError(message, reason=reason, module_path=self.collection, what_to_do=what_to_do)


_WHAT_TO_DO = "pass inverse_indices=(names, indices), indices [features, B] of bags within each feature's own batch."
