"""The public names of recfx: ``recfx/__init__.py`` imports this when the first of them is used."""

from recfx.checkpoint import load_checkpoint, save_checkpoint
from recfx.collections.hash_collections import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
)
from recfx.conversion.add_operator import add_operator
from recfx.conversion.convert import convert, trace
from recfx.conversion.unconvert import unconvert
from recfx.errors import (
    CheckpointError,
    ConversionError,
    DrawingError,
    ExportError,
    InputError,
    OutOfStepError,
    RecfxError,
    RecfxWarning,
    TableFullError,
)
from recfx.exporter.delta import export_delta, merge_deltas
from recfx.exporter.export import export
from recfx.exporter.load import LoadedModel, load
from recfx.exporter.report import DeltaReport, ExportReport
from recfx.exporter.tracked import track_changes
from recfx.hashing import HashConfig, HashIndex
from recfx.inspect.cost import compare_plans, cost
from recfx.inspect.drawing.draw import draw
from recfx.inspect.explain import explain
from recfx.inspect.monitor import Monitor, monitor
from recfx.inspect.report import Report
from recfx.models.sample import Sample
from recfx.models.verify import verify
from recfx.models.verify_report import VerifyReport
from recfx.passes import PACKAGE as passes
from recfx.pipeline.train_pipeline import TrainPipeline
from recfx.planner.plan import plan
from recfx.planner.sharder import sharders
from recfx.versions import __version__

__all__ = [
    "CheckpointError",
    "ConversionError",
    "DeltaReport",
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
    "RecfxWarning",
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
    "export_delta",
    "load",
    "load_checkpoint",
    "merge_deltas",
    "monitor",
    "passes",
    "plan",
    "save_checkpoint",
    "sharders",
    "trace",
    "track_changes",
    "unconvert",
    "verify",
]
