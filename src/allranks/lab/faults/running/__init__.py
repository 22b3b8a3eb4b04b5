"""Faults that strike a running job: the contract is in `strike.py`, all of them are listed in `catalogue.py`."""
