"""What an installed wheel must do without a compiler: convert, train, export and serve. Prints where its library is."""

import os
import shutil
import sys
import tempfile

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import recfx
from recfx.kernels.build import library


class TwoTower(torch.nn.Module):
    """Two tables of raw ids, one user and one movie or more in a sample."""

    def __init__(self) -> None:
        super().__init__()
        users = EmbeddingBagConfig(name="users", num_embeddings=1000, embedding_dim=8, feature_names=["user"])
        movies = EmbeddingBagConfig(name="movies", num_embeddings=500, embedding_dim=8, feature_names=["movie"])
        self.ebc = EmbeddingBagCollection(tables=[users, movies])
        self.over = torch.nn.Linear(8, 8)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(features)
        return (self.over(pooled["user"]) * pooled["movie"]).sum(dim=1)


def main() -> None:
    """Exits with a message where something is not as it should be."""
    compilers = [name for name in ("g++", "c++", "clang++", "gcc", "cc") if shutil.which(name)]
    if compilers:
        sys.exit(f"there are compilers: {compilers}")
    raw_ids = KeyedJaggedTensor(
        keys=["user", "movie"],
        values=torch.tensor([-(2**63), 7_000_000_000, 41, 42, 43]),
        lengths=torch.tensor([1, 1, 1, 2]),
    )
    model = recfx.convert(TwoTower(), sample=(raw_ids,), hashing=recfx.HashConfig.raw_ids())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(raw_ids) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if losses[-1] >= losses[0]:
        sys.exit(f"the losses do not fall: {losses}")
    reasons = [reason.code for reason in recfx.explain(model).reasons]
    if "no_library" in reasons or library.why_not():
        sys.exit(f"there is no library: {library.why_not()}")
    for portable in (True, False):
        path = os.path.join(tempfile.mkdtemp(), "model.pt")
        recfx.export(model, path, (raw_ids,), portable=portable)
        served = recfx.load(path)(raw_ids)
        if not torch.allclose(served, model.eval()(raw_ids), atol=1e-6):
            sys.exit(f"portable={portable}: served {served.tolist()}")
    print(torch.__version__, library.loaded_path())


if __name__ == "__main__":
    main()
