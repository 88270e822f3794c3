"""recfx: a graph-rewriting compiler pass for recommendation models.

``convert`` rewrites the embedding collections of TorchRec in any model to hashed collections of explicit nodes;
``explain``, ``trace``, ``draw`` and ``verify`` show what it did and that the result is right; ``unconvert`` undoes it;
``save_checkpoint`` and ``load_checkpoint`` save and restore a training run; ``plan`` and ``sharders`` shard a model;
``TrainPipeline`` trains a sharded one, and ``monitor`` watches its tables; ``export`` writes a model for a server
without Python, and ``load`` reads it.
"""

from recfx.doctor import at_start  # says what is missing where what follows cannot be imported

# isort: split
from recfx.checkpoint import load_checkpoint, save_checkpoint
from recfx.collections.averaged_model import extend_averaging
from recfx.collections.pooled import HashEmbeddingBagCollection, HashEmbeddingBagConfig
from recfx.collections.sequence import HashEmbeddingCollection, HashEmbeddingConfig
from recfx.conversion.add_operator import add_operator
from recfx.conversion.convert import OBSERVERS, convert
from recfx.conversion.trace import trace
from recfx.conversion.unconvert import unconvert
from recfx.discovery.sample import Sample
from recfx.errors import (
    CheckpointError,
    ConversionError,
    DrawingError,
    ExportError,
    InputError,
    OutOfStepError,
    RecfxError,
    TableFullError,
)
from recfx.exporter.export import export
from recfx.exporter.load import LoadedModel, load
from recfx.exporter.report import ExportReport
from recfx.exporter.torch_entry import extend_torch
from recfx.hashing import HashConfig, HashIndex
from recfx.inspect import Report
from recfx.inspect.cost import compare_plans, cost
from recfx.inspect.drawing.draw import draw
from recfx.inspect.drawing.trace_directory import ConversionTrace, trace_sharded
from recfx.inspect.explain import explain
from recfx.inspect.monitor import Monitor, monitor
from recfx.passes import PACKAGE as passes
from recfx.pipeline.train_pipeline import TrainPipeline
from recfx.planner.plan import plan
from recfx.planner.sharder import sharders
from recfx.planner.torchrec_entry import AFTER_SHARDING, extend_torchrec
from recfx.verification.verify import verify
from recfx.verification.verify_report import VerifyReport
from recfx.version import __version__

extend_torchrec()  # DistributedModelParallel(recfx.convert(model)) shards what was converted, as it does without recfx
OBSERVERS.append(ConversionTrace.begin)  # what RECFX_TRACE asks for
AFTER_SHARDING.append(trace_sharded)
extend_torch()  # torch.jit.script compiles what was converted
extend_averaging()  # torch's AveragedModel follows the ids of hashed tables
del AFTER_SHARDING, OBSERVERS, ConversionTrace, extend_averaging, extend_torch, extend_torchrec, trace_sharded
del at_start

__all__ = [
    "CheckpointError",
    "ConversionError",
    "DrawingError",
    "ExportError",
    "ExportReport",
    "HashConfig",
    "HashEmbeddingBagCollection",
    "HashEmbeddingBagConfig",
    "HashEmbeddingCollection",
    "HashEmbeddingConfig",
    "HashIndex",
    "InputError",
    "LoadedModel",
    "Monitor",
    "OutOfStepError",
    "RecfxError",
    "Report",
    "Sample",
    "TableFullError",
    "TrainPipeline",
    "VerifyReport",
    "__version__",
    "add_operator",
    "compare_plans",
    "convert",
    "cost",
    "draw",
    "explain",
    "export",
    "load",
    "load_checkpoint",
    "monitor",
    "passes",
    "plan",
    "save_checkpoint",
    "sharders",
    "trace",
    "unconvert",
    "verify",
]


def __dir__() -> list[str]:
    return __all__
