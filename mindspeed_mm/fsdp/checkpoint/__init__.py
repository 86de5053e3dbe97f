"""Checkpoints written and read while training."""
