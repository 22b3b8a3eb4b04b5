"""What a flight recorder holds, and who waits for whom in it: for running jobs (guard) and dead ones (why)."""
