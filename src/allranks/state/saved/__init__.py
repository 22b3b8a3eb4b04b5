"""Checkpoints: how a state becomes files that can be believed, and a state again. `checkpoint.py` first."""
