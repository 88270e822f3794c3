"""Plans for sharding, and the ways by which TorchRec shards converted collections."""
