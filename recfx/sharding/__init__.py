"""Sharded training: plans, the sharders that TorchRec asks for, and the sharded collection itself."""
