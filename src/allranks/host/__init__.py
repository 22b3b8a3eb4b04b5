"""The machine's edge: the only readers of /proc, /sys and external tools. They take a root: tests feed trees."""
