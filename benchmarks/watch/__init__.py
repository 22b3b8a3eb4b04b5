"""What does `allranks watch` say of jobs that allranks did not start? Planted faults, five launchers, healthy jobs."""
