"""Family 5, the job: `script` (how it was started, and how it ended), `alike` (what must be equal on all nodes)."""
