"""Trains so that communication and hashing of the next batch overlap with the step of the current one."""
