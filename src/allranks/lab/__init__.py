"""A cluster.toml as a real SLURM cluster in namespaces of one Linux machine; the verbs are in `lab.py`."""
