"""Checkpoints: how a state becomes files that are verified, and a state again. Read `checkpoint.py` first."""
