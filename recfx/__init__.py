"""recfx: a graph-rewriting compiler pass for recommendation models.

``convert`` rewrites the ``torchrec.EmbeddingBagCollection``s of any model to hashed collections of explicit nodes;
``explain``, ``trace`` and ``verify`` show what it did and that it is right; ``unconvert`` goes back;
``save_checkpoint`` and ``load_checkpoint`` keep a training; ``plan`` and ``sharders`` shard one,
``TrainPipeline`` runs it.
"""

from recfx.checkpoint import load_checkpoint, save_checkpoint
from recfx.collection import HashEmbeddingBagCollection, HashEmbeddingBagConfig
from recfx.convert import convert
from recfx.errors import (
    CheckpointError,
    ConversionError,
    ExportError,
    InputError,
    OutOfStepError,
    RecfxError,
    TableFullError,
)
from recfx.hashing import HashConfig, HashIndex
from recfx.inspect import Report, explain
from recfx.passes import passes
from recfx.sample import Sample
from recfx.sharding.default_sharders import sharders
from recfx.sharding.planning import plan
from recfx.sharding.torchrec_entry import extend_torchrec
from recfx.trace import trace
from recfx.training.pipeline import TrainPipeline
from recfx.unconvert import unconvert
from recfx.verify import verify
from recfx.verify_report import VerifyReport

__version__ = "0.1.0"

extend_torchrec()  # DistributedModelParallel(recfx.convert(model)) shards what was converted, as it does without recfx

__all__ = [
    "CheckpointError",
    "ConversionError",
    "ExportError",
    "HashConfig",
    "HashEmbeddingBagCollection",
    "HashEmbeddingBagConfig",
    "HashIndex",
    "InputError",
    "OutOfStepError",
    "RecfxError",
    "Report",
    "Sample",
    "TableFullError",
    "TrainPipeline",
    "VerifyReport",
    "convert",
    "explain",
    "load_checkpoint",
    "passes",
    "plan",
    "save_checkpoint",
    "sharders",
    "trace",
    "unconvert",
    "verify",
]
