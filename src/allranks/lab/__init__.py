"""A cluster.toml as a real SLURM cluster in namespaces of one Linux machine. Read `lab.py` first."""
