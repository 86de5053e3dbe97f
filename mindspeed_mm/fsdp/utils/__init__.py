"""Registries, and the only access to an accelerator."""
