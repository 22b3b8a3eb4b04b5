"""Drills of a running job: `strike_drill.py` has the phases."""
