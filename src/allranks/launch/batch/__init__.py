"""SLURM jobs: the batch script, its submission, and the state and output of a job."""
