"""Sharding plans, and the entry points through which TorchRec shards converted collections."""
