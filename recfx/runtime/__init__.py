"""The modules that the nodes of the graph call, one file per node kind."""

from recfx.runtime.find_ids import FindIds, InsertIds, SnapshotIndexes
from recfx.runtime.find_rows import FindRows
from recfx.runtime.hash_ids import HashIds
from recfx.runtime.hash_lookup import HashLookup
from recfx.runtime.input_dist import Bucketize, InputDistStart, InputDistWait
from recfx.runtime.keyed_tensor import AssembleKeyedTensor
from recfx.runtime.lookup import Lookup
from recfx.runtime.mean_divide import MeanDivide
from recfx.runtime.output_dist import OutputDistStart, OutputDistWait
from recfx.runtime.select_features import SelectFeatures
from recfx.runtime.table_store import TableStore
from recfx.runtime.transfers import ToDevice, ToHost

__all__ = [
    "AssembleKeyedTensor",
    "Bucketize",
    "FindIds",
    "FindRows",
    "HashIds",
    "HashLookup",
    "InputDistStart",
    "InputDistWait",
    "InsertIds",
    "Lookup",
    "MeanDivide",
    "OutputDistStart",
    "OutputDistWait",
    "SelectFeatures",
    "SnapshotIndexes",
    "TableStore",
    "ToDevice",
    "ToHost",
]
