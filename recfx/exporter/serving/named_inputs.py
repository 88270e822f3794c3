"""The inputs of a server by name: plain tensors, from which batches are made."""

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class NamedTensor(nn.Module):
    """One tensor under its own name, with the number of dimensions of the sample, -1 if that is not known."""

    def __init__(self, name: str, dimensions: int = -1, floats: bool = False) -> None:
        super().__init__()
        self.name = name
        self.dimensions = dimensions
        self.floats = floats

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """The tensor. One of another rank might be broadcast into an answer to something else."""
        tensor = input_named(inputs, self.name)
        if self.dimensions >= 0:
            if tensor.dim() != self.dimensions:
                raise RuntimeError(
                    f"input {self.name} must have {self.dimensions} dimensions, but is {tensor.shape} [wrong_rank]"
                )
            if tensor.is_floating_point() != self.floats:
                expected = "floats" if self.floats else "integers or bools"
                raise RuntimeError(f"input {self.name} must be of {expected} [wrong_dtype]")
        return tensor


class NamedFeatures(nn.Module):
    """One KJT: ``<name>.<feature>.values`` and ``.lengths`` of each feature, and ``.weights`` if it is weighted."""

    features: list[str]

    def __init__(self, name: str, features: tuple[str, ...], is_weighted: bool) -> None:
        super().__init__()
        self.name = name
        self.features = list(features)
        self.is_weighted = is_weighted

    def forward(self, inputs: dict[str, torch.Tensor]) -> KeyedJaggedTensor:
        """The KJT; every feature needs the same number of lengths, one per sample."""
        values: list[torch.Tensor] = []
        lengths: list[torch.Tensor] = []
        weights: list[torch.Tensor] = []
        counts: list[int] = []
        for feature in self.features:
            name = f"{self.name}.{feature}"
            ids, bags = input_named(inputs, f"{name}.values"), input_named(inputs, f"{name}.lengths")
            check_types(name, ids, bags)
            if len(lengths) > 0 and bags.numel() != lengths[0].numel():
                raise RuntimeError(
                    f"{name}.lengths has {bags.numel()} samples, but "
                    f"{self.name}.{self.features[0]}.lengths has {lengths[0].numel()} [bad_lengths]"
                )
            values.append(ids)
            lengths.append(bags)
            counts.append(ids.numel())
            if self.is_weighted:
                weights.append(input_named(inputs, f"{name}.weights"))
                check_weights(name, ids, weights[-1])
        all_lengths = torch.stack(lengths)
        is_wrong = False
        if all_lengths.numel() > 0:
            least, most = torch.aminmax(all_lengths)
            is_wrong = int(least) < 0 or int(most) > max(counts)
        if is_wrong or not torch.equal(all_lengths.sum(1), torch.tensor(counts, device=all_lengths.device)):
            for number, feature in enumerate(self.features):  # says which feature it is
                check_lengths(f"{self.name}.{feature}", values[number], lengths[number])
        return KeyedJaggedTensor(
            keys=self.features,
            values=torch.cat(values),
            weights=torch.cat(weights) if self.is_weighted else None,
            lengths=all_lengths.view(-1),
        )


def input_named(inputs: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The input of this name. Scriptable."""
    if name not in inputs:
        raise RuntimeError(f"input {name} is missing [missing_input]")
    if inputs[name].is_meta:
        raise RuntimeError(f"input {name} is on device 'meta', which holds no values [wrong_argument]")
    return inputs[name]


def check_plain(name: str, features: KeyedJaggedTensor) -> None:
    """Refuse batches whose bags are not those of one batch of samples. Scriptable."""
    if features.variable_stride_per_key():
        raise RuntimeError(f"{name}: features of different batch sizes are not served [bad_lengths]")
    if features.inverse_indices_or_none() is not None:
        raise RuntimeError(f"{name}: bags are not expanded by inverse indices here [inverse_indices]")


def check_types(name: str, values: torch.Tensor, lengths: torch.Tensor) -> None:
    """Refuse ids and lengths that are not lists of integers. Scriptable."""
    if values.dim() != 1 or lengths.dim() != 1:
        raise RuntimeError(
            f"{name}: values must be [n] and lengths [B], but they are {values.shape} and {lengths.shape} [bad_ids]"
        )
    if values.dtype != torch.int64 and values.dtype != torch.int32:
        raise RuntimeError(f"{name}: ids must be int64 or int32 [wrong_id_dtype]")
    if lengths.dtype != torch.int64 and lengths.dtype != torch.int32:
        raise RuntimeError(f"{name}: lengths must be int64 or int32 [bad_lengths]")


def check_lengths(name: str, values: torch.Tensor, lengths: torch.Tensor) -> None:
    """Refuse ids and lengths that are not one batch of bags. Scriptable."""
    check_types(name, values, lengths)
    least, most = 0, 0
    if lengths.numel() > 0:
        low, high = torch.aminmax(lengths)
        least, most = int(low), int(high)
    check_sums(name, least, most, int(lengths.sum()), values.size(0))


def check_sums(name: str, least: int, most: int, total: int, count: int) -> None:
    """Refuse lengths that are not those of so many ids. Scriptable."""
    if least < 0:
        raise RuntimeError(f"{name}: a length is negative [bad_lengths]")
    if most > count:  # the sum of such lengths may overflow
        raise RuntimeError(f"{name}: a length is {most}, but there are {count} ids [bad_lengths]")
    if total != count:
        raise RuntimeError(f"{name}: the lengths add up to {total}, but there are {count} ids [bad_lengths]")


def check_weights(name: str, values: torch.Tensor, weights: torch.Tensor) -> None:
    """Refuse weights that are not one number per id. Scriptable."""
    if weights.dim() != 1 or weights.numel() != values.size(0):
        raise RuntimeError(f"{name}: there are weights {weights.shape} for {values.size(0)} ids [bad_weights]")
