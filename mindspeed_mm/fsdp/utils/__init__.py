"""Registries and the only door to an accelerator."""
