"""What many lines say together; each is pure and looks at all logs."""
