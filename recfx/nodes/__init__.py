"""The modules that the nodes of the graph call, one file a word of the vocabulary."""

from recfx.nodes.hash_ids import HashIds
from recfx.nodes.keyed_tensor import AssembleKeyedTensor
from recfx.nodes.lookup import Lookup
from recfx.nodes.mean_divide import MeanDivide
from recfx.nodes.select_features import SelectFeatures
from recfx.nodes.table_store import TableStore

__all__ = ["AssembleKeyedTensor", "HashIds", "Lookup", "MeanDivide", "SelectFeatures", "TableStore"]
