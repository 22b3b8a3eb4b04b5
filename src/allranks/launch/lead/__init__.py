"""The leader: it receives the agents' reports, decides, and prints. Read `leader.py` first."""
