"""cluster.toml: its keys, its values, and the line of each. Reads only the file."""
