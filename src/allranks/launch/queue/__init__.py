"""SLURM beside a running job: what its signals mean, and how the job goes back into the queue. `scheduler.py` first."""
