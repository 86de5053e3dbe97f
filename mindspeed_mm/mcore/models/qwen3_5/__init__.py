"""Qwen3.5 by one YAML with flags, data and model."""
