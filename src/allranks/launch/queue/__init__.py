"""SLURM and a running job: what its signals mean, and how the job is requeued. Read `scheduler.py` first."""
