"""Where the ranks of a running job are: the step that looks, and equal stacks folded."""
