"""Expert parallelism: the experts of a mixture over several ranks."""
