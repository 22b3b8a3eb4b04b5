"""`allranks check` and `allranks init` on nodes: which nodes, what one node does, the SLURM step, and the result."""
