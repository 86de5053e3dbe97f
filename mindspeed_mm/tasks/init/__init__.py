"""Writes the first configuration for a model and rows."""
