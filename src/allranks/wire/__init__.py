"""How agents speak with each other: frames, the handshake, the leader and how it is found. No torch."""
