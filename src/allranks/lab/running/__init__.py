"""Drills of a running job: `drill.py` says how one goes."""
