"""What TorchRec's planner assumes of a batch of which nothing is known."""

BATCH_SIZE = 512
"""Samples per rank."""

LENGTH = 1
"""Ids per bag."""
