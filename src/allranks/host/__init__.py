"""The machine's edge: the only readers of /proc, /sys and external tools. Each takes a root, so that tests feed trees."""
