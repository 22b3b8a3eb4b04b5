"""What can be broken in a lab, by name: the contract is in `fault.py`, all of them are listed in `catalogue.py`."""
