"""The leader: what it hears, what it decides, and how it says it. `leader.py` first."""
