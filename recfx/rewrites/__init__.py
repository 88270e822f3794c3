"""The passes as rewrites of graphs that are data, one file each; ``recfx.passes()`` has their order."""

from recfx.rewrites.base import Rewrite, Rewriting, Rewritten, run_rewrites

__all__ = ["Rewrite", "Rewriting", "Rewritten", "run_rewrites"]
