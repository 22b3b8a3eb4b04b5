"""Data and pure functions, imported by all other packages. No I/O, no clock, no torch."""
