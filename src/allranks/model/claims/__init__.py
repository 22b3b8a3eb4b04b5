"""What each launcher says about this process: the table of launchers, and how its rows are read."""
