"""The guard: what is told of running workers, and what it means."""
