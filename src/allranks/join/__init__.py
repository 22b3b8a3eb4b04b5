"""What runs inside the user's workers: how it gets there, and a diagnosable `init_process_group`.

The files here run in the worker's Python, which may be another one than the agent's: standard library and torch only.
"""
