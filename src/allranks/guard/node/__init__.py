"""What a node sees of its workers, network and GPUs, and tells with each heartbeat. Read `heartbeat.py` first."""
