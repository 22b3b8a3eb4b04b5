"""Faults that strike a running job: `strike.py` has the contract, `catalogue.py` lists all of them."""
