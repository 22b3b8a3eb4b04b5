"""The ground: data and pure functions. No I/O, no clock, no torch."""
