"""Opens files and directories that others may have made, changed or swapped. Standard library only."""
