"""The modules that the nodes of an exported graph call: each compiles under TorchScript, and holds what it needs.

They read tensors only: no tables, indexes or optimizers of the model that is being exported. Class attributes are
annotated without postponed evaluation, because TorchScript reads the annotations of empty lists.
"""

from recfx.exporter.serving.assemble import AssembleColumns, DivideMeans
from recfx.exporter.serving.find_rows import FindFrozenRows
from recfx.exporter.serving.pool_rows import FindAndPool, PoolRows
from recfx.exporter.serving.select_bags import Bags, SelectBags, ServedNode
from recfx.exporter.serving.targets import ATEN, FOR_DEVICES, NATIVE, SCRIPT, TRACED, TRITON, ServingTarget

__all__ = [
    "ATEN",
    "FOR_DEVICES",
    "NATIVE",
    "SCRIPT",
    "TRACED",
    "TRITON",
    "AssembleColumns",
    "Bags",
    "DivideMeans",
    "FindAndPool",
    "FindFrozenRows",
    "PoolRows",
    "SelectBags",
    "ServedNode",
    "ServingTarget",
]
