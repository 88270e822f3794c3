"""recfx: a graph-rewriting compiler pass for recommendation models."""
from recfx.convert import convert
