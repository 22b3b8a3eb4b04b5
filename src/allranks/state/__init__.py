"""Checkpoints that cannot lie, and what makes a resumed run the same run."""
