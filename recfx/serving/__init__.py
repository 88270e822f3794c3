"""The modules that the nodes of an exported graph call: each compiles under TorchScript, and holds what it needs.

They read tensors only: no tables, indexes or optimizers of the model that is being exported. Class attributes are
annotated without postponed evaluation, because TorchScript reads the annotations of empty lists.
"""

from recfx.serving.assemble import AssembleColumns
from recfx.serving.bags import Bags, ServedNode
from recfx.serving.divide_means import DivideMeans
from recfx.serving.find_and_pool import FindAndPool
from recfx.serving.find_rows import FindFrozenRows
from recfx.serving.pool_rows import PoolRows
from recfx.serving.select_bags import SelectBags
from recfx.serving.targets import ATEN, FOR_DEVICES, NATIVE, SCRIPT, TRACED, TRITON, ServingTarget

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
