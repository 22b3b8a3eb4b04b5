"""Starts, watches and ends the workers of a job."""
