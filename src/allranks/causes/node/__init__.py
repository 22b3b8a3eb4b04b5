"""Family 0, the node itself: `limits`, `places` (its directories), `presence` (is it there at all, and who is it)."""
