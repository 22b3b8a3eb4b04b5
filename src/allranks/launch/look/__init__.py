"""The stacks of a running job's ranks: the step that reads them, and equal stacks folded."""
