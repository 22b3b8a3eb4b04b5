"""Starts, watches and ends the workers of a job. Read `job.py` first, then `lead/course.py`."""
