"""Errors, file writing, patterns, suggestions and units. Nothing here imports torch."""
