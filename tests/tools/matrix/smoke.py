"""The shortest way through recfx, on the versions that are installed: convert, train, save, two ranks, export."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import recfx


class Model(nn.Module):
    """A table of raw ids, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(name="t", num_embeddings=64, embedding_dim=8, feature_names=["f"])
        self.ebc = EmbeddingBagCollection(tables=[table])
        self.layer = nn.Linear(8, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """The logit of each sample."""
        return self.layer(self.ebc(features).values()).squeeze(1)


def batch(step: int) -> KeyedJaggedTensor:
    """Four samples of two ids."""
    ids = torch.arange(8) * 2**40 + step
    return KeyedJaggedTensor(["f"], ids, lengths=torch.full((4,), 2))


def converted() -> nn.Module:
    """The model with an index and a fused optimizer."""
    torch.manual_seed(0)
    model = Model()
    apply_optimizer_in_backward(torch.optim.Adagrad, model.ebc.parameters(), {"lr": 0.1})
    return recfx.convert(model, hashing=recfx.HashConfig.raw_ids())


def train(model: nn.Module, steps: range) -> torch.Tensor:
    """The losses."""
    losses = []
    for step in steps:
        loss = model(batch(step % 3)).sigmoid().sum()
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def on_a_rank(rank: int, folder: str, expected: torch.Tensor) -> None:
    """Take the same steps with a sharded model: both ranks have the same batches, so the mean gradient is the same."""
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/ranks")
    model = DistributedModelParallel(converted(), device=torch.device("cpu"), sharders=recfx.sharders())
    torch.testing.assert_close(train(model, range(4)), expected)
    dist.destroy_process_group()


def main() -> None:
    """Raises where something is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        model = converted()
        expected = train(model, range(4))
        recfx.save_checkpoint(model, Path(folder, "saved"))
        resumed = converted()
        recfx.load_checkpoint(resumed, Path(folder, "saved"))
        torch.testing.assert_close(train(resumed, range(4, 6)), train(model, range(4, 6)), rtol=0, atol=0)
        processes.spawn(on_a_rank, (folder, expected), nprocs=2)
        recfx.export(model, Path(folder, "model.pt"), (batch(0),))
        loaded = recfx.load(Path(folder, "model.pt"))
        torch.testing.assert_close(loaded(batch(0)), model.eval()(batch(0)))
    print(f"convert, train, save, two ranks, export: well on torch {torch.__version__}")


if __name__ == "__main__":
    main()
