"""Comparing a converted model with its original, step by step, on copies."""
