"""The book of causes: what can be wrong with a job, one text file a cause, and how it is looked for."""
