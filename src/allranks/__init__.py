"""Brings every rank of a distributed PyTorch job up, and names the one that is not."""

__version__ = "0.1.0"
