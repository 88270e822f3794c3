"""The modules that the nodes of the graph call."""

from recfx.runtime.assemble import AssembleKeyedTensor, MeanDivide
from recfx.runtime.find_rows import FindRows
from recfx.runtime.hash_ids import FindIds, HashIds, HashLookup, InsertIds, SnapshotIndexes
from recfx.runtime.input_dist import Bucketize, InputDistStart, InputDistWait
from recfx.runtime.lookup import Lookup
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
