"""Context parallelism: one sequence over several ranks."""
