"""Elastic Horovod inside a SLURM allocation: started, watched, and its pauses explained. Read `run.py` first."""
