"""Checkpoints that are verified, and what makes a resumed run equal to one that was never interrupted."""
