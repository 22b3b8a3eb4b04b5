"""What is known of a job as typed facts, and the one solver that tells from them who broke it."""
