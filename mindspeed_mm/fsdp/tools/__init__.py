"""What looks at a run from outside: profilers, the memory tracker, counts of operations."""
