"""Optimizers, schedules and gradient clipping."""
