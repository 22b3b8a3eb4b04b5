"""Communication between agents: frames, the handshake, and finding the leader. No torch."""
