"""Before the first collective: is everybody here, alike, reachable? `rollcall` runs it; `judge` and `blame` decide."""
