"""Data for training: rows to batches."""
