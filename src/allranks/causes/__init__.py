"""The catalogue: what can be wrong with a job, one class a cause. `catalogue` finds them; `cause` is their contract."""
