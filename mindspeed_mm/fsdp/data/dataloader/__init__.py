"""The order of the samples, and the loader that deals them to ranks and carries batches from the workers."""
