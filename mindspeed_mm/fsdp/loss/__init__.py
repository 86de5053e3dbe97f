"""Objectives: what a loss counts and what it sums."""
