"""Before the first collective: is everybody here, alike, and reachable? `rollcall` runs it, `judge` and `blame` decide."""
