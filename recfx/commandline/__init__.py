"""``python -m recfx``: recfx from a shell, for people and for CI."""
