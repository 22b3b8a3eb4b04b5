"""The faults of the lab, by name: `fault.py` has the contract, `catalogue.py` lists all of them."""
