"""Output: text and JSON."""
