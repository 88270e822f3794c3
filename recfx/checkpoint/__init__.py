"""Checkpoints: a whole training state in one directory, switched in one step, checked before anything is loaded."""

from recfx.checkpoint.load import load_checkpoint
from recfx.checkpoint.save import save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
