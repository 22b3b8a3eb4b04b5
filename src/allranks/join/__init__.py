"""Code that runs inside the user's workers: how it is loaded, and a diagnosable `init_process_group`.

These files run in the worker's Python, which may differ from the agent's: standard library and torch only.
"""
