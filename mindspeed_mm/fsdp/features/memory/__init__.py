"""Features that save memory in training: recomputation, offloading and slices of a micro-batch."""
