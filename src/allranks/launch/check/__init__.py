"""`allranks check` and `allranks init` over nodes: where they run, one node's part, the step, and what came of it."""
