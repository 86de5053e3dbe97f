"""Converters between Hugging Face folders and distributed checkpoints, which train under a YAML file."""
