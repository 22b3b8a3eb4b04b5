"""The guard: finds the fault in a running job, and its culprit. Read `verdict.py` first; it asks the other modules."""
