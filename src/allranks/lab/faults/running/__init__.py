"""Faults that strike a running job: `strike.py` has the contract, `strike_catalogue.py` lists all of them."""
