"""Drills of a running job: `drill.py` has the phases."""
