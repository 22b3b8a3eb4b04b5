"""Where does the time of the job go: computing, waiting for whom, the network, pauses? Read `ledger.py` first."""
