"""Replaces standard collections with converted ones around the same parameters."""
