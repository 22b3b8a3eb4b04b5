"""The guard's part inside every worker: standard library and torch only, loaded by path through `join/hook.py`."""
