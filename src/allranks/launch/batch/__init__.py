"""Jobs of SLURM: the batch script, its submission, and what becomes of it."""
