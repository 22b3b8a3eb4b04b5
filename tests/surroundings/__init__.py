"""Real jobs in broken and hostile surroundings, judged by facts: run.py has the command line, and says what to read."""
