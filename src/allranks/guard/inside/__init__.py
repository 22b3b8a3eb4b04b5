"""What the guard has inside every worker: standard library and torch only, loaded by path through `join/hook.py`."""
