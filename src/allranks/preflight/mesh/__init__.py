"""One node's end of the pair tests: `tester` tries other nodes, `echo` answers those that try it."""
