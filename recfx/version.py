"""The version of recfx."""

__version__ = "0.1.0"
