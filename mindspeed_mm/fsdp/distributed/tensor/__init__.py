"""Tensor and sequence parallelism: the matrices of a layer over several ranks."""
