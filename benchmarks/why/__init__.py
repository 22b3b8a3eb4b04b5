"""Whole generated jobs with a known fault, and the score of a tool that explains failed jobs. See README.md."""
