"""What a job leaves behind and prints: the run directory, verdicts, tables, JSON."""
