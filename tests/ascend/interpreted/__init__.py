"""Tests that need kernels which Triton's interpreter runs; ``tests/ascend/test_interpreted_targets.py`` runs them."""
