"""Conclusions from many lines together; each reading is pure and looks at all logs."""
