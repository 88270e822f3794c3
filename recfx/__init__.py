"""recfx: a graph-rewriting compiler pass for recommendation models.

    convert          rewrite the embedding collections of TorchRec in a model as hashed collections of explicit nodes
    unconvert        make them TorchRec's again
    explain          report what is converted, and why the rest is not
    verify           compare a converted model with the original
    trace            one graph of the whole model
    draw             a picture of a model, as HTML, SVG or text
    cost             what each node costs per step
    plan, sharders   shard a model over ranks, and compare_plans to price several plans
    TrainPipeline    train a sharded model
    monitor          watch how full tables are while they train
    save_checkpoint  save a training run, and load_checkpoint to restore it
    export           write a model for a server without Python, and load to read it
    export_delta     write what has changed since; track_changes makes that fast, and merge_deltas makes a base of it
    add_operator     declare an operator that passes of your own add to graphs
    passes           the passes that convert runs, in order

``help(recfx.convert)`` and the like say what each takes, returns and raises.

Torch and TorchRec are imported when one of these names is first used.

The examples of all functions and classes begin with these lines:

    >>> import recfx
    >>> import torch
    >>> from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    >>> class Model(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         users = EmbeddingBagConfig(name="users", num_embeddings=100, embedding_dim=8, feature_names=["user"])
    ...         self.ebc = EmbeddingBagCollection(tables=[users])
    ...         self.over = torch.nn.Linear(8, 1)
    ...     def forward(self, features):
    ...         return self.over(self.ebc(features)["user"])
    >>> batch = KeyedJaggedTensor(["user"], torch.tensor([41, 42, 42]), lengths=torch.tensor([2, 1]))
    >>> sample = (batch,)
"""

from typing import TYPE_CHECKING

from recfx.commandline.doctor.packages import check_at_start

check_at_start()  # says what is missing where what is imported later cannot be

from recfx.collections.first_use import FIRST_USE  # noqa: E402
from recfx.versions import __version__ as __version__  # noqa: E402

if TYPE_CHECKING:
    from recfx.api import *  # noqa: F403, they are those of its __all__
    from recfx.api import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        """A public name, or a package of recfx: the first that is asked for brings all of them."""
        is_loaded, is_hidden = "__all__" in globals(), name.startswith("__") and name != "__all__"
        if not is_loaded and not is_hidden:
            import recfx.api as api

            globals().update({name: getattr(api, name) for name in ("__all__", *api.__all__)})
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)


def __dir__() -> list[str]:
    from recfx.api import __all__ as names

    return names


def _extend() -> None:
    """Let torch and TorchRec know about converted collections, and warn of what a conversion's report warns of."""
    from recfx.collections.table_holder import guard_tables
    from recfx.conversion.convert import WHEN_READY
    from recfx.exporter.torch_entry import extend_torch
    from recfx.inspect.describe import warn
    from recfx.planner.torchrec_entry import extend_torchrec

    extend_torchrec()  # DistributedModelParallel(recfx.convert(model)) shards what was converted, as it does without
    extend_torch()  # torch.jit.script and torch.export refuse what was converted
    guard_tables()  # AveragedModel refuses tables with an index
    WHEN_READY.append(warn)


FIRST_USE.append(_extend)
del FIRST_USE, TYPE_CHECKING, _extend, check_at_start
