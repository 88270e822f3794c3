"""The version of recfx, and those of torch and TorchRec that it runs on: their sets, and what differs between them."""

__version__ = "0.1.0"
