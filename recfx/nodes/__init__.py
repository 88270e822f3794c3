"""The modules that the nodes of the graph call, one file per node kind."""

from recfx.nodes.bucketize import Bucketize
from recfx.nodes.find_ids import FindIds
from recfx.nodes.find_rows import FindRows
from recfx.nodes.hash_ids import HashIds
from recfx.nodes.hash_lookup import HashLookup
from recfx.nodes.input_dist import InputDistStart, InputDistWait
from recfx.nodes.insert_ids import InsertIds
from recfx.nodes.keyed_tensor import AssembleKeyedTensor
from recfx.nodes.lookup import Lookup
from recfx.nodes.mean_divide import MeanDivide
from recfx.nodes.output_dist import OutputDistStart, OutputDistWait
from recfx.nodes.select_features import SelectFeatures
from recfx.nodes.snapshot_indexes import SnapshotIndexes
from recfx.nodes.table_store import TableStore
from recfx.nodes.to_device import ToDevice
from recfx.nodes.to_host import ToHost

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
