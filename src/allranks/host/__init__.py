"""The only readers of /proc, /sys and external tools. They take a root directory, so tests can provide their own."""
