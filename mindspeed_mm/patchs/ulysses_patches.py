"""Empty: attention over several ranks is a plan (`parallel.ulysses_parallel_size`)."""
