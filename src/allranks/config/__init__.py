"""cluster.toml: what may stand in it, what does, and on which line. Looks at the file only."""
