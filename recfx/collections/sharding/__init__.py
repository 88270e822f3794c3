"""Sharded collections: explicit communication nodes, built on TorchRec's dist modules."""
